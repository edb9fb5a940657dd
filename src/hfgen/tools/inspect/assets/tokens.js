// The text: prompt and tokens, coloured; moving from token to token.
const COLOURS = {
  probability: ["probability", "by the model's own probability"],
  final_probability: ["after processors", "by the probability that it was chosen with"],
  entropy: ["entropy", "by how uncertain the model was"],
  shift: ["interventions", "by how much likelier the interventions made it"],
};
// From 0, certain, to 1: a probability of 1/256 and below, or an entropy of 8 bits and above.
const heatOf = (p) => (p === null ? 0 : p <= 0 ? 1 : Math.min(1, -Math.log2(p) / 8));
// How many bits likelier the interventions made a token.
const shift = (token) => Math.log2((token.probability ?? 0) / (token.unedited_probability || 1e-9));
const bitsOf = { entropy: (token) => token.entropy ?? 0, shift };
const heat = (token) => (state.colour in bitsOf ? Math.max(0, Math.min(1, bitsOf[state.colour](token) / 8)) : heatOf(token[state.colour]));

function pieces(id) {
  const text = spelled(id);
  if (!hasText || text === "") return [`${visible(id)} `];
  const parts = text.split(CONTROLS).filter((part) => part !== "");
  return parts.map((part) => (CONTROLS.test(part) ? el("i", { class: "white" }, { "\n": "⏎\n", "\t": "⇥\t" }[part] ?? code(part)) : part));
}

function showText() {
  const { prompt, tokens, finish_reason, stop, score: total } = sequence();
  const { text, token_ids } = trace.prompts[prompt];
  byId("prompt").replaceChildren(text ?? token_ids.map((id) => `#${id} `).join(""));
  byId("text").replaceChildren(...tokens.map(tokenElement));
  const reasons = { length: "cut off by its length", eos: "ended by itself", stop: "stopped" };
  const ending = [`${plural(tokens.length, "token")}, ${reasons[finish_reason] ?? finish_reason}`];
  if (finish_reason === "stop" && stop !== null) ending.push(`by ${JSON.stringify(stop)}`);
  if (total !== null) ending.push(`· score ${score(total)}`);
  byId("ending").textContent = ending.join(" ");
}

function tokenElement(token, place) {
  const left = allowed(token);
  const classes = ["token", token.is_drafted && "drafted", left !== null && left <= 1 && "forced"];
  const attributes = {
    id: `t${place}`,
    class: classes.filter(Boolean).join(" "),
    role: "option",
    "aria-selected": "false",
    "aria-label": `${visible(token.token_id)}, ${percent(token.probability)}`,
    style: { "--t": heat(token).toFixed(3) },
  };
  return el("span", attributes, ...pieces(token.token_id));
}

function showLegend() {
  const inBits = state.colour in bitsOf;
  const steps = inBits ? [0, 2, 4, 6, 8] : [1, 0.5, 0.1, 0.02, 0.004];
  const label = (v) => (state.colour === "shift" ? `${2 ** v}×` : inBits ? `${v} bits` : `${100 * v}%`);
  const heats = steps.map((v) => (inBits ? v / 8 : heatOf(v)));
  byId("legend").replaceChildren(...steps.map((v, n) => el("span", { style: { "--t": heats[n].toFixed(3) } }, label(v))));
  for (const button of byId("colours").children) {
    button.setAttribute("aria-checked", String(button.dataset.colour === state.colour));
    button.tabIndex = button.dataset.colour === state.colour ? 0 : -1;
  }
}

// Buttons of which one is chosen: arrow keys move, as in a group of radio buttons or tabs.
function choices(parent, buttons) {
  parent.replaceChildren(...buttons);
  parent.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const next = buttons[(buttons.indexOf(event.target) + by + buttons.length) % buttons.length];
    next.focus();
    next.click();
  });
}

function makeColours() {
  const isAbsent = { final_probability: !isProcessed, shift: !isEdited };
  const shown = Object.entries(COLOURS).filter(([name]) => !isAbsent[name]);
  const buttons = shown.map(([name, [label, title]]) => {
    const button = el("button", { type: "button", role: "radio", title: `Colour ${title}` }, label);
    button.dataset.colour = name;
    button.addEventListener("click", () => {
      state.colour = name;
      showLegend();
      sequence().tokens.forEach((token, n) => byId(`t${n}`).style.setProperty("--t", heat(token).toFixed(3)));
    });
    return button;
  });
  choices(byId("colours"), buttons);
}

// The token in the line above (-1) or below (+1) that is nearest.
function inLine(by) {
  const nodes = [...byId("text").children];
  const here = nodes[state.token].getClientRects()[0];
  const far = (rect) => Math.abs(rect.left - here.left);
  const rects = nodes.map((node) => node.getClientRects()[0]);
  const others = rects.filter((rect) => (rect.top - here.top) * by > 4);
  if (!others.length) return state.token;
  const top = others.reduce((best, rect) => ((rect.top - best) * by < 0 ? rect.top : best), others[0].top);
  const line = rects.map((rect, n) => [rect, n]).filter(([rect]) => Math.abs(rect.top - top) <= 4);
  return line.reduce((best, each) => (far(each[0]) < far(best[0]) ? each : best))[1];
}

function makeMoving() {
  const text = byId("text");
  const at = (event) => event.target.closest(".token");
  text.addEventListener("keydown", (event) => {
    const last = sequence().tokens.length - 1;
    const moves = {
      ArrowRight: () => state.token + 1,
      ArrowLeft: () => state.token - 1,
      ArrowDown: () => inLine(1),
      ArrowUp: () => inLine(-1),
      Home: () => 0,
      End: () => last,
    };
    if (!moves[event.key] || last < 0) return;
    event.preventDefault();
    select(Math.max(0, Math.min(last, moves[event.key]())), true);
  });
  text.addEventListener("click", (event) => at(event) && select(Number(at(event).id.slice(1))));
  text.addEventListener("pointerover", (event) => {
    if (event.pointerType === "mouse" && at(event)) showDetails(Number(at(event).id.slice(1)));
  });
  text.addEventListener("pointerleave", () => showDetails(state.token));
}

// Select a token of the sequence: in the text, in the panel and in the charts.
function select(place, scrolls = false) {
  for (const node of byId("text").querySelectorAll("[aria-selected=true]")) node.setAttribute("aria-selected", "false");
  state.token = place;
  const node = byId(`t${place}`);
  if (node) {
    node.setAttribute("aria-selected", "true");
    byId("text").setAttribute("aria-activedescendant", node.id);
    if (scrolls) node.scrollIntoView({ block: "nearest" });
  }
  showDetails(place);
  moveCursors();
  followBeam(place);
}
