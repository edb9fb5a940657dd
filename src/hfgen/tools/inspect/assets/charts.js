// Entropy along the text, time per step, speculation rounds, and the tree of beams.
const cursors = [];
// A cursor may go to another place: tell the charts where the selected token is.
function moveCursors() {
  for (const move of cursors) move();
}

function showEntropy() {
  const tokens = sequence().tokens;
  const parent = byId("entropy");
  const width = Math.max(parent.clientWidth, 200), height = 84, left = 26, bottom = 4;
  const most = Math.max(1, ...tokens.flatMap((token) => [token.entropy ?? 0, token.final_entropy ?? 0]));
  const slot = (width - left) / Math.max(tokens.length, 1);
  const x = (n) => left + (n + 0.5) * slot;
  const y = (value) => height - bottom - ((height - bottom - 8) * (value ?? 0)) / most;
  const path = (name) => tokens.map((token, n) => `${n ? "L" : "M"}${x(n).toFixed(1)} ${y(token[name]).toFixed(1)}`).join("");
  const cursor = svg("line", { class: "cursor", y1: 0, y2: height });
  const label = `Entropy of ${tokens.length} tokens, at most ${most.toFixed(1)} bits`;
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
  chart.append(
    svg("line", { class: "axis", x1: left, x2: width, y1: y(0), y2: y(0) }),
    svg("text", { x: 0, y: y(most) + 4 }, most.toFixed(1)),
    svg("text", { x: 0, y: y(0) }, "0"),
  );
  if (tokens.length) {
    chart.append(svg("path", { class: "area", d: `${path("entropy")}L${x(tokens.length - 1)} ${y(0)}L${x(0)} ${y(0)}Z` }));
    chart.append(svg("path", { class: "model-line", d: path("entropy") }));
    if (isProcessed) chart.append(svg("path", { class: "final-line", d: path("final_entropy") }));
  }
  chart.append(cursor);
  const over = svg("rect", { class: "hit", x: left, y: 0, width: width - left, height });
  const at = (event) => {
    const box = over.getBoundingClientRect();
    return Math.max(0, Math.min(tokens.length - 1, Math.floor(((event.clientX - box.left) / box.width) * tokens.length)));
  };
  over.addEventListener("click", (event) => tokens.length && select(at(event), true));
  over.addEventListener("pointermove", (event) => event.pointerType === "mouse" && tokens.length && showDetails(at(event)));
  over.addEventListener("pointerleave", () => showDetails(state.token));
  chart.append(over);
  parent.replaceChildren(chart);
  cursors[0] = () => {
    cursor.setAttribute("x1", x(state.token));
    cursor.setAttribute("x2", x(state.token));
  };
}

function showTimes() {
  const steps = trace.steps, parent = byId("steps");
  const width = Math.max(parent.clientWidth, 200), height = 84, left = 34;
  const sorted = steps.map((step) => step.seconds).sort((a, b) => a - b);
  const median = sorted.length ? sorted[Math.floor(sorted.length / 2)] : 0;
  const rest = steps.length > 1 ? `, then ${time(median)} a step (median)` : "";
  byId("timing").textContent = `Prepared in ${time(trace.prepare_seconds)}, first step with the prompt ${time(steps[0]?.seconds ?? 0)}${rest}; copies of the scores for this page are part of it.`;
  // The first step may be so much longer than the others that these could not be seen.
  const most = Math.max(1e-9, Math.min(sorted[sorted.length - 1] ?? 0, 4 * median));
  const slot = (width - left) / Math.max(steps.length, 1);
  const y = (seconds) => height - 4 - ((height - 16) * Math.min(seconds, most)) / most;
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `Times of ${steps.length} steps` });
  chart.append(svg("text", { x: 0, y: y(most) + 8 }, (1000 * most).toFixed(most < 0.01 ? 1 : 0)), svg("text", { x: 0, y: height - 4 }, "0"));
  const now = svg("rect", { class: "current", y: 0, height, width: slot });
  chart.append(now);
  steps.forEach((step, n) => {
    let from = 0;
    const parts = [["draft", step.draft_seconds], ["forward", step.forward_seconds], ["rest", Infinity]];
    for (const [kind, seconds] of parts) {
      const to = Math.min(step.seconds, from + seconds);
      const bar = { class: kind, x: left + n * slot + slot * 0.1, width: slot * 0.8, y: y(to), height: Math.max(0, y(from) - y(to)) };
      if (to > from) chart.append(svg("rect", bar));
      from = to;
    }
    if (step.seconds > most && n === 0) chart.append(svg("text", { x: left, y: 9 }, `↑ ${time(step.seconds)}`));
    else if (step.seconds > most && n * slot > 64) chart.append(svg("text", { x: left + (n + 0.2) * slot, y: 9 }, "↑"));
    const choose = () => select(Math.max(0, sequence().tokens.findIndex((token) => token.step === n)), true);
    chart.append(svg("rect", { class: "hit", x: left + n * slot, y: 0, width: slot, height, onclick: choose }, svg("title", {}, `step ${n + 1}: ${time(step.seconds)}, forward ${time(step.forward_seconds)}, ${plural(step.n_tokens, "token")}`)));
  });
  byId("drafting").hidden = !steps.some((step) => step.draft_seconds > 0);
  parent.replaceChildren(chart);
  cursors[1] = () => now.setAttribute("x", left + (sequence().tokens[state.token]?.step ?? 0) * slot);
}

function showRounds() {
  const found = trace.steps.flatMap((step, n) => step.drafts.filter((draft) => draft.sequence === state.sequence).map((draft) => [n, draft]));
  const isAssisted = trace.steps.some((step) => step.drafts.length);
  byId("rounds").hidden = !isAssisted;
  if (!isAssisted) return;
  const drafted = found.reduce((sum, [, draft]) => sum + draft.token_ids.length, 0);
  const accepted = found.reduce((sum, [, draft]) => sum + draft.n_accepted, 0);
  const n = sequence().tokens.length;
  byId("speculation").textContent = `${plural(found.length, "round")} with a draft: ${accepted} of ${plural(drafted, "drafted token")} accepted (${percent(drafted ? accepted / drafted : 0)}); ${(n / Math.max(trace.steps.length, 1)).toFixed(2)} tokens per step.`;
  byId("drafts").replaceChildren(...found.map(([step, draft]) => {
    const place = (k) => draft.position + k;
    const chip = (kind, id, at) => el("button", { type: "button", class: `chip ${kind}`, "aria-label": `${visible(id)}, ${kind}`, onclick: () => select(Math.min(at, n - 1), true) }, visible(id) + (kind === "rejected" ? " ✗" : ""));
    const chips = draft.token_ids.map((id, k) => chip(k < draft.n_accepted ? "accepted" : "rejected", id, place(k)));
    const own = sequence().tokens[place(draft.n_accepted)];
    if (own && !own.is_drafted) chips.push("→", chip("own", own.token_id, place(draft.n_accepted)));
    return el("li", {}, el("b", {}, `step ${step + 1}: ${draft.n_accepted} of ${draft.token_ids.length}`), ...chips);
  }));
}

const tree = { step: 0, node: 0, groups: [] };

function showTree() {
  const steps = trace.beams[sequence().prompt];
  byId("beams").hidden = !steps;
  if (!steps) return;
  // As many steps side by side as there is room for, the next ones below.
  const wide = 88, tall = 27, boxWidth = 68, boxHeight = 20, room = Math.max(byId("tree").clientWidth - 36, wide);
  const perLine = Math.max(1, Math.floor((room - 12) / wide));
  const lineHeight = (Math.max(...steps.map((nodes) => nodes.length), 1) + 0.5) * tall;
  const x = (step) => 12 + (step % perLine) * wide, y = (step, n) => 6 + Math.floor(step / perLine) * lineHeight + n * tall;
  const chart = svg("svg", { height: Math.ceil(steps.length / perLine) * lineHeight });
  const edges = svg("g", {}), boxes = svg("g", {});
  tree.groups = steps.map((nodes, step) => nodes.map((node, n) => {
    if (node.parent !== null) {
      const [x1, y1, x2, y2] = [x(step - 1) + boxWidth, y(step - 1, node.parent) + boxHeight / 2, x(step), y(step, n) + boxHeight / 2];
      const middle = (x1 + x2) / 2;
      const curve = x1 < x2 ? `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}` : `M${x1} ${y1}h10M${x2 - 10} ${y2}h10`;
      edges.append(svg("path", { class: node.fate, d: curve }));
    }
    const mark = { died: " ×", finished: " ▪", returned: "", open: "" }[node.fate];
    const group = svg(
      "g",
      { class: node.fate, role: "img", "aria-label": said(step, node) },
      svg("rect", { x: x(step), y: y(step, n), width: boxWidth, height: boxHeight, rx: 5 }),
      svg("text", { x: x(step) + 5, y: y(step, n) + 14 }, short(visible(node.token_id), mark ? 7 : 9) + mark),
    );
    group.addEventListener("click", () => selectBeam(step, n));
    group.addEventListener("pointerover", () => (byId("beam").textContent = said(step, node)));
    boxes.append(group);
    return group;
  }));
  chart.append(edges, boxes);
  byId("tree").replaceChildren(chart);
}

function said(step, node) {
  const fates = { returned: "on a sequence that is returned", open: "goes on", finished: "ended, but is not returned", died: "died: later beams were better" };
  return `Step ${step + 1}: “${visible(node.token_id)}”, score ${score(node.score)}, ${fates[node.fate]}`;
}

function selectBeam(step, n) {
  tree.groups.flat().forEach((group) => group.classList.remove("now"));
  const group = tree.groups[step]?.[n];
  if (!group) return;
  [tree.step, tree.node] = [step, n];
  group.classList.add("now");
  byId("beam").textContent = group.getAttribute("aria-label");
  const view = byId("tree"), box = group.getBoundingClientRect(), around = view.getBoundingClientRect();
  if (box.top < around.top) view.scrollTop -= around.top - box.top + 10;
  if (box.bottom > around.bottom) view.scrollTop += box.bottom - around.bottom + 10;
}

// The beam that became a token of the sequence which is shown.
function followBeam(place) {
  const nodes = trace.beams[sequence().prompt]?.[place] ?? [];
  const token = sequence().tokens[place];
  const n = nodes.findIndex((node) => node.fate === "returned" && node.token_id === token?.token_id);
  if (n >= 0) selectBeam(place, n);
}

function makeTree() {
  byId("tree").addEventListener("keydown", (event) => {
    const steps = trace.beams[sequence().prompt] ?? [];
    const { step, node } = tree;
    const child = () => (steps[step + 1] ?? []).findIndex((each) => each.parent === node);
    const moves = {
      ArrowLeft: () => [step - 1, steps[step]?.[node]?.parent ?? -1],
      ArrowRight: () => [step + 1, child()],
      ArrowUp: () => [step, node - 1],
      ArrowDown: () => [step, node + 1],
    };
    if (!moves[event.key]) return;
    event.preventDefault();
    selectBeam(...moves[event.key]());
  });
}
