// What is shown of which sequence, at first and when the window changes.
function showHead() {
  const n = trace.sequences.reduce((sum, each) => sum + each.tokens.length, 0);
  byId("title").textContent = `${trace.model} · ${trace.mode.replaceAll("_", " ")}`;
  const parts = [plural(trace.sequences.length, "sequence"), plural(n, "token"), plural(trace.steps.length, "step")];
  parts.push(`vocabulary of ${count(trace.vocabulary_size)}`);
  byId("summary").textContent = parts.join(" · ");
  byId("after").hidden = !isProcessed;
  const settings = Object.entries(trace.settings).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, short(written(value), 400))]);
  byId("settings").replaceChildren(...settings);
}

function makeTabs() {
  if (trace.sequences.length < 2) return;
  const buttons = trace.sequences.map((each, n) => {
    const name = trace.prompts.length > 1 ? trace.prompts[each.prompt].text ?? `prompt ${each.prompt + 1}` : each.text ?? "";
    const label = `${n + 1}: ${short(name.trim().replace(/\s+/g, " "), 24)}`;
    return el("button", { type: "button", role: "tab", "aria-controls": "text", onclick: () => show(n) }, label);
  });
  choices(byId("tabs"), buttons);
}

function show(n) {
  state.sequence = n;
  [...byId("tabs").children].forEach((tab, k) => {
    tab.setAttribute("aria-selected", String(k === n));
    tab.tabIndex = k === n ? 0 : -1;
  });
  showText();
  draw();
  showRounds();
  select(0);
}

function draw() {
  showEntropy();
  showTimes();
  showTree();
  moveCursors();
}

showHead();
makeTabs();
makeColours();
makeMoving();
makeTree();
showLegend();
show(0);
let waiting = 0;
addEventListener("resize", () => {
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(() => (draw(), followBeam(state.token)));
});
