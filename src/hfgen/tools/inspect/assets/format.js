// The data, elements made without HTML in text, and how ids and numbers are written.
const trace = JSON.parse(document.getElementById("trace").textContent);
const state = { sequence: 0, token: 0, colour: "probability" };
const byId = (id) => document.getElementById(id);

function make(space, tag, attributes, children) {
  const node = space ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, v] of Object.entries(value)) node.style.setProperty(key, v);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}
const el = (tag, attributes, ...children) => make(null, tag, attributes, children);
const svg = (tag, attributes, ...children) => make("http://www.w3.org/2000/svg", tag, attributes, children);

const hasText = Object.keys(trace.spelling).length > 0;
const spelled = (id) => trace.spelling[id] ?? `#${id}`;

// What moves the text behind it, or has no picture; but for joiners, which emoji and scripts are made with.
const CONTROLS = /([\0-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff])/;
const code = (character) => `U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;

// A token on one line: white space can be seen.
function visible(id) {
  const text = spelled(id).replace(/ {3,}/g, (run) => `␣×${run.length}`).replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll("\r", "␍");
  return text === "" ? "∅" : text.split(CONTROLS).map((part) => (CONTROLS.test(part) ? code(part) : part)).join("");
}

const short = (text, n) => (text.length > n ? `${text.slice(0, n - 1)}…` : text);

function percent(p) {
  if (p === null) return "–";
  if (p === 0) return "0%";
  if (p < 0.0005) return "<0.1%";
  return `${(100 * p).toFixed(p >= 0.9995 && p < 1 ? 2 : 1)}%`;
}
const bits = (value) => (value === null ? "–" : `${value.toFixed(2)} bits`);
const score = (value) => (value === null ? "cut" : value.toFixed(Math.abs(value) >= 100 ? 0 : 2));
const count = (n) => n.toLocaleString("en");
function time(seconds) {
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  return `${(1000 * seconds).toFixed(seconds < 0.01 ? 2 : 1)} ms`;
}
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

function stageName(stage) {
  const values = Object.entries(stage.settings).filter(([, value]) => typeof value !== "boolean");
  if (!values.length) return stage.name;
  const one = values.length === 1;
  return `${stage.name} ${values.map(([name, v]) => (one ? "" : `${name} `) + short(written(v), 24)).join(", ")}`;
}
const written = (v) => (Array.isArray(v) ? `[${v.map(written).join(", ")}]` : String(v));

// Whether anything but a logarithm came between the logits and the choice.
const isProcessed = trace.stages.slice(1).some((stage) => stage.name !== "log-probability");
// Whether the call had interventions, and it is known what they changed.
const isEdited = trace.sequences.some((each) => each.tokens.some((token) => token.unedited_probability !== null));

const sequence = () => trace.sequences[state.sequence];

// The stage at which a token was ruled out, or -1.
const cutAt = (scores) => scores.findIndex((value) => value === null);
const grammarStages = trace.stages.flatMap((stage, n) => (stage.is_grammar ? [n] : []));
// How many tokens a grammar leaves, or null where none masks.
function allowed(token) {
  return grammarStages.length ? token.left[grammarStages[0]] : null;
}
