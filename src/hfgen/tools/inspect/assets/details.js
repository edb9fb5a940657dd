// The panel of one token: its numbers, what else was likely, and what each processor did.
function showDetails(place) {
  const token = sequence().tokens[place];
  const panel = byId("details");
  if (!token) {
    panel.replaceChildren(el("p", { class: "hint" }, "No token was generated."));
    return;
  }
  const fact = (name, value) => el("div", {}, el("dt", {}, name), el("dd", {}, value));
  panel.replaceChildren(
    el("div", {}, el("span", { class: "chip" }, visible(token.token_id)), ` ${place + 1} of ${sequence().tokens.length}`, el("span", { class: "hint" }, hasText ? ` · id ${token.token_id}` : "")),
    el(
      "dl",
      { class: "facts" },
      fact("model's probability", percent(token.probability)),
      isEdited ? fact("without interventions", percent(token.unedited_probability)) : null,
      fact("its rank", token.rank ? count(token.rank) : "–"),
      isProcessed ? fact("after processors", percent(token.final_probability)) : null,
      fact("entropy", bits(token.entropy)),
      isProcessed ? fact("… after processors", bits(token.final_entropy)) : null,
    ),
    ...notes(token),
    el("h3", {}, "What else was likely"),
    candidatesTable(token),
    ...(isProcessed ? [el("h3", {}, "Tokens left, and their share of the model's probability"), el("p", { class: "hint" }, "The bars are logarithmic in the number of tokens."), funnel(token)] : []),
    ...(trace.stages.length > 1 ? [el("h3", {}, "Scores after each processor"), scoresTable(token)] : []),
  );
}

function notes(token) {
  const found = [];
  const left = allowed(token);
  if (left !== null) {
    const what = left <= 1 ? "leaves no choice" : `leaves ${count(left)} of ${count(trace.vocabulary_size)} tokens`;
    const best = token.candidates[0];
    const other = best && best.token_id !== token.token_id && cutAt(best.scores) === grammarStages[0];
    found.push(`The grammar ${what}${other ? `; it rules out ${visible(best.token_id)}, the likeliest` : ""}.`);
  }
  if (token.is_drafted) found.push(`Drafted, and accepted in step ${token.step + 1}.`);
  else if (trace.steps[token.step] && trace.steps.some((step) => step.drafts.length)) found.push("Chosen by the model itself.");
  return found.map((text) => el("p", { class: "note" }, text));
}

const rows = (token) => {
  const others = token.candidates;
  return others.some((each) => each.token_id === token.token_id) ? others : [...others, token];
};

function candidatesTable(token) {
  const head = ["token", "", "model", isProcessed ? "after" : null, "logit"].filter((name) => name !== null);
  const most = Math.max(...rows(token).flatMap((each) => [each.probability ?? 0, isProcessed ? each.final_probability ?? 0 : 0]));
  const width = (p) => ({ width: `${((100 * (p ?? 0)) / most).toFixed(2)}%` });
  const body = rows(token).map((each) => {
    const cut = cutAt(each.scores);
    const classes = [each.token_id === token.token_id && "chosen", cut >= 0 && "out"].filter(Boolean).join(" ");
    const bars = el("td", { class: "bars" }, el("i", { class: "of-model", style: width(each.probability) }));
    if (isProcessed) bars.append(el("i", { class: "of-final", style: width(each.final_probability) }));
    return el(
      "tr",
      { class: classes, title: cut >= 0 ? `ruled out by ${stageName(trace.stages[cut])}` : null },
      el("td", {}, visible(each.token_id)),
      bars,
      el("td", {}, percent(each.probability)),
      isProcessed ? el("td", {}, cut >= 0 ? `cut: ${short(trace.stages[cut].name, 12)}` : percent(each.final_probability)) : null,
      el("td", {}, score(each.scores[0])),
    );
  });
  return el("table", { class: "candidates" }, el("thead", {}, el("tr", {}, ...head.map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, ...body));
}

// A bar per stage: how many tokens are left, on a scale of logarithms, and their share of the model's probability.
function funnel(token) {
  const most = Math.log(token.left[0] + 1);
  const items = trace.stages.map((stage, n) => {
    const left = token.left[n];
    const isCut = n > 0 && left < token.left[n - 1];
    if (n > 0 && !isCut) return null;
    const bar = el("i", { style: { width: `${((100 * Math.log(left + 1)) / most).toFixed(1)}%` } });
    const name = n === 0 ? "vocabulary" : stageName(stage);
    const said = n === 0 ? count(left) : `${count(left)} · ${percent(token.mass[n])}`;
    return el("li", {}, el("span", {}, name), el("span", {}, said), el("span", { class: "track" }, bar));
  });
  const found = items.filter((item) => item !== null);
  if (found.length === 1) found.push(el("li", {}, el("span", {}, "no processor ruled out a token")));
  return el("ul", { class: "funnel" }, ...found);
}

function scoresTable(token) {
  const head = ["token", ...trace.stages.map(stageName)];
  const body = rows(token).map((each) => {
    const cut = cutAt(each.scores);
    const cells = each.scores.map((value, n) => el("td", {}, cut >= 0 && n > cut ? "" : score(value)));
    const classes = [each.token_id === token.token_id && "chosen", cut >= 0 && "out"].filter(Boolean).join(" ");
    return el("tr", { class: classes }, el("td", {}, visible(each.token_id)), ...cells);
  });
  const table = el("table", { class: "scores" }, el("thead", {}, el("tr", {}, ...head.map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, ...body));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Scores after each processor" }, table);
}
