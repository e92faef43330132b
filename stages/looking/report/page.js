"use strict";
// Everything from the data becomes text nodes: nothing that a policy wrote is ever read as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const by = (id) => document.getElementById(id);
const COLORS = ["advantage", "logprob", "ratio", "mask"];
const state = { shown: [], at: 0, color: "advantage", drawn: null, held: null };

function make(tag, text, className) {
  const found = document.createElement(tag);
  if (text !== undefined && text !== null) found.textContent = text;
  if (className) found.className = className;
  return found;
}

// Light, dark, or what the system says.
by("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});

// Charts: each point tells what it is, under the pointer or by the arrow keys of a focused chart.
const tip = by("tip");
const MARKS = "path[aria-roledescription=point], path[aria-roledescription=bar]";
let marked = null;
function tell(mark) {
  if (marked) marked.classList.remove("on");
  marked = mark;
  if (!mark) { tip.hidden = true; return; }
  mark.classList.add("on");
  tip.textContent = mark.getAttribute("aria-label").split(" | ").join(", ");
  tip.hidden = false;
  const box = mark.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(innerWidth - tip.offsetWidth - 8, box.left - tip.offsetWidth / 2))}px`;
  tip.style.top = `${Math.max(8, box.top - tip.offsetHeight - 10)}px`;
}
function stepOf(mark) {
  const found = /\| steps? (\d+)/.exec(mark.getAttribute("aria-label"));
  return found ? found[1] : null;
}
function nearest(figure, x) {
  let best = null, least = 24;
  for (const mark of figure.querySelectorAll(MARKS)) {
    const box = mark.getBoundingClientRect(), away = Math.abs(box.left + box.width / 2 - x);
    if (away < least) { least = away; best = mark; }
  }
  return best;
}
for (const figure of document.querySelectorAll("figure")) {
  figure.addEventListener("pointermove", (event) => {
    const direct = event.target.closest(MARKS);
    tell(direct || (figure.querySelector("path[aria-roledescription=point]") ? nearest(figure, event.clientX) : null));
  });
  figure.addEventListener("pointerleave", () => tell(null));
  figure.addEventListener("blur", () => tell(null));
  figure.addEventListener("click", () => { if (marked && figure.dataset.curve) goToStep(stepOf(marked)); });
  figure.addEventListener("keydown", (event) => {
    const marks = [...figure.querySelectorAll(MARKS)];
    const at = marks.indexOf(marked);
    if (event.key === "ArrowRight" && marks.length) tell(marks[Math.min(marks.length - 1, at + 1)]);
    else if (event.key === "ArrowLeft" && marks.length) tell(marks[Math.max(0, at - 1)]);
    else if (event.key === "Enter" && at >= 0 && figure.dataset.curve) goToStep(stepOf(marked));
    else if (event.key === "Escape") tell(null);
    else return;
    event.preventDefault();
  });
}
function goToStep(step) {
  const options = [...by("step").options].map((option) => option.value).filter((value) => value !== "");
  if (step === null || !options.length) return;
  by("step").value = options.reduce((a, b) => (Math.abs(b - step) < Math.abs(a - step) ? b : a));
  filter();
  by("attempts").scrollIntoView();
}

// The browser of trajectories.
function options(select, first, values, names) {
  select.append(new Option(first, ""));
  for (const value of values) select.append(new Option(names ? names(value) : value, value));
}
options(by("run"), "any run", data.runs.map((_, index) => index), (index) => data.runs[index]);
by("run").hidden = data.runs.length < 2;
options(by("step"), "any step", [...new Set(data.trajectories.map((t) => t.step))].sort((a, b) => a - b), (s) => `step ${s}`);
options(by("pattern"), "with or without errors", [...new Set(data.trajectories.flatMap((t) => t.patterns))].sort());
for (const t of data.trajectories) {
  const texts = [t.id, t.task, t.env, t.error, ...t.messages.map((m) => m[1]), ...t.calls.map((c) => `${c.tool} ${c.result}`)];
  t.text = texts.join("\n").toLowerCase();
}
const outcomeOf = (t) => (t.success === true ? "yes" : t.success === false ? "no" : "none");
const ORDERS = {
  step: (a, b) => a.step - b.step || a.run - b.run || a.row - b.row,
  worst: (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity),
  best: (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity),
  long: (a, b) => (b.length ?? -1) - (a.length ?? -1),
};
function filter() {
  const words = by("search").value.toLowerCase(), run = by("run").value, step = by("step").value;
  const outcome = by("outcome").value, pattern = by("pattern").value;
  state.shown = data.trajectories.filter((t) =>
    (!words || t.text.includes(words)) && (run === "" || t.run === Number(run)) && (step === "" || t.step === Number(step)) &&
    (!outcome || outcomeOf(t) === outcome) && (!pattern || t.patterns.includes(pattern)));
  state.shown.sort(ORDERS[by("order").value]);
  by("count").textContent = `${state.shown.length} of ${data.trajectories.length}`;
  by("list").replaceChildren(...state.shown.map((t, index) => {
    const item = make("li", null, outcomeOf(t));
    item.setAttribute("role", "option");
    item.id = `item-${index}`;
    const run = data.runs.length > 1 ? `${data.runs[t.run]}, ` : "";
    const about = [`${run}step ${t.step}`, count(t.turns, "turn"), count(t.length ?? "?", "token"), ...t.patterns].join(", ");
    item.append(make("i"), make("span", t.task, "t"), make("span", t.reward ?? t.score ?? "not scored"), make("span", about, "s"));
    item.addEventListener("click", () => select(index));
    return item;
  }));
  select(0);
}
function select(index) {
  state.at = Math.max(0, Math.min(state.shown.length - 1, index));
  for (const item of by("list").children) item.setAttribute("aria-selected", item.id === `item-${state.at}`);
  const item = by("list").children[state.at];
  if (item) {
    by("list").setAttribute("aria-activedescendant", item.id);
    const top = item.offsetTop - by("list").offsetTop;  // only the list scrolls, never the page
    if (top < by("list").scrollTop || top > by("list").scrollTop + by("list").clientHeight - 50) by("list").scrollTop = top - 60;
  }
  draw(state.shown[state.at]);
}
const count = (value, what) => `${value} ${what}${value === 1 ? "" : "s"}`;
const short = (value) => (typeof value === "number" ? String(Number(value.toPrecision(4))) : value ?? "?");
function draw(t) {
  state.drawn = t ?? null;
  const both = [state.held, t].filter((one, index) => one && (index === 0 || one !== state.held));
  by("one").classList.toggle("two", both.length > 1);
  if (!t) by("one").replaceChildren(make("p", "No trajectory of the sample meets these conditions.", "muted"));
  else by("one").replaceChildren(...both.map(whole));
}
function hold(t) {
  state.held = state.held === t ? null : t;
  draw(t);
}
function whole(t) {
  const box = make("div");
  const facts = make("dl", null, "facts");
  const fact = (name, value) => facts.append(make("dt", name), make("dd", value));
  fact("trajectory", `${t.id} (step ${t.step}, row ${t.row})`);
  if (data.runs.length > 1) fact("run", data.runs[t.run]);
  fact("ended", `${t.status} (${t.stop})`);
  fact("reward", t.reward === null ? (t.score ?? "not scored") : `${short(t.reward)}  (${Object.entries(t.parts).map(([n, v]) => `${n} ${short(v)}`).join(", ")})`);
  if (t.advantage !== null) fact("advantage", `${short(t.advantage)}, mean of its sampled tokens`);
  fact("policy", `version ${t.policy ?? "?"}`);
  if (t.patterns.length) fact("errors", t.patterns.map((p) => `${p}: ${data.patterns[p]}`).join("; "));
  if (t.error) fact("failed by", t.error);
  fact("task's data", t.meta);
  const held = make("button", state.held === t ? "let go" : "hold beside the next");
  held.type = "button";
  held.addEventListener("click", () => hold(t));
  const parts = [make("h3", `${t.env}, ${t.task}`), held, facts, siblings(t)];
  let turn = -1;
  for (const [role, text] of t.messages) {
    const box = make("div", null, "turn");
    if (["assistant", "user", "tool", "system"].includes(role)) box.classList.add(role);
    box.append(make("b", role), make("pre", text));
    if (role === "assistant") {
      turn += 1;
      for (const call of t.calls.filter((c) => c.turn === turn)) box.append(callLine(call));
    }
    parts.push(box);
  }
  for (const call of t.calls.filter((c) => c.turn > turn)) parts.push(callLine(call));
  if (t.tokens.text.length) parts.push(...tokens(t));
  box.append(...parts);
  return box;
}
function callLine(call) {
  const line = make("div", null, `call mono ${call.ok ? "ok" : "failed"}`);
  const what = call.error === "no_answer" ? "neither a call nor an answer" : call.tool ? `${call.tool}(${call.args})` : "a call that cannot be read";
  line.append(make("b", call.ok ? "ok " : `${call.error} `), document.createTextNode(`${what} → ${call.result}`));
  return line;
}
function siblings(t) {
  const box = make("div", null, "pills");
  const others = data.trajectories.filter((o) => o.group === t.group && o.run === t.run && o.step === t.step);
  const same = data.trajectories.filter((o) => o.task === t.task && (o.run !== t.run || o.step !== t.step));
  for (const [list, name] of [[others, (o) => `attempt ${o.sample}: ${short(o.reward)}`], [same, (o) => `${data.runs[o.run]}, step ${o.step}: ${short(o.reward)}`]]) {
    if (list === others && list.length < 2) continue;
    for (const other of list.slice(0, 12)) {
      const button = make("button", name(other));
      button.type = "button";
      button.setAttribute("aria-pressed", other === t);
      button.addEventListener("click", () => {
        const index = state.shown.indexOf(other);
        if (index >= 0) select(index); else draw(other);
      });
      box.append(button);
    }
  }
  return box;
}
// How far a token is from what is usual, from -1 to 1.
function shade(t, index, largest) {
  const value = (t.tokens[state.color] ?? [])[index];
  if (state.color === "mask") return t.tokens.mask[index] === "1" ? 0.6 : 0;
  if (value === null || value === undefined) return 0;
  if (state.color === "advantage") return largest ? value / largest : 0;
  if (state.color === "logprob") return -Math.min(1, -value / 5);
  return Math.max(-1, Math.min(1, Math.log2(Math.max(value, 1e-9))));
}
const MEANINGS = {
  advantage: "green: pushed up, red: pushed down, faint: not sampled",
  logprob: "red: unlikely when it was sampled (5 nats or more at its fullest), faint: not sampled",
  ratio: "green: likelier at the update than when it was sampled, red: less likely, faint: not sampled",
  mask: "green: trained on, faint: not sampled",
};
function tokens(t) {
  const pills = make("div", null, "pills");
  for (const color of COLORS) {
    const button = make("button", color);
    button.type = "button";
    button.disabled = color !== "mask" && !t.tokens[color];
    if (button.disabled) button.title = "nothing recorded it";
    button.setAttribute("aria-pressed", color === state.color);
    button.addEventListener("click", () => { state.color = color; draw(state.drawn); });
    pills.append(button);
  }
  const box = make("div", null, "tokens mono");
  const largest = Math.max(0, ...(t.tokens.advantage ?? []).map((value) => Math.abs(value ?? 0)));
  t.tokens.text.forEach((text, index) => {
    const span = make("span", text);
    const strength = shade(t, index, largest);
    if (t.tokens.mask[index] !== "1") span.className = "off";
    else if (Math.abs(strength) > 0.02) span.style.background = `rgba(var(${strength > 0 ? "--up" : "--down"}), ${Math.min(1, Math.abs(strength)) * 0.5})`;
    const facts = ["logprob", "advantage", "ratio"].filter((n) => (t.tokens[n] ?? [])[index] !== undefined && t.tokens[n][index] !== null).map((n) => `${n} ${short(t.tokens[n][index])}`);
    span.title = [`token ${index}`, ...facts].join(", ");
    box.append(span);
  });
  if (t.tokens.left) box.append(make("em", ` … ${t.tokens.left} more tokens`));
  return [make("p", `Tokens of the response. ${MEANINGS[state.color]}`, "muted"), pills, box];
}
for (const id of ["run", "step", "outcome", "pattern", "order"]) by(id).addEventListener("change", filter);
by("search").addEventListener("input", filter);
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.matches("input, select, textarea");
  if (typing && event.key === "Escape") event.target.blur();
  if (typing) return;
  if (event.key === "j") select(state.at + 1);
  else if (event.key === "k") select(state.at - 1);
  else if (event.key === "c" && state.shown.length) {
    const t = state.shown[state.at], usable = COLORS.filter((color) => color === "mask" || t.tokens[color]);
    state.color = usable[(usable.indexOf(state.color) + 1) % usable.length];
    draw(state.drawn);
  } else if (event.key === "x" && state.drawn) hold(state.drawn);
  else if (event.key === "/") by("search").focus();
  else return;
  event.preventDefault();
});
by("list").addEventListener("keydown", (event) => {
  const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };
  if (!(event.key in moves)) return;
  select(Math.max(0, Math.min(state.shown.length - 1, state.at + moves[event.key])));
  event.preventDefault();
});
by("settings-search").addEventListener("input", (event) => {
  const words = event.target.value.toLowerCase();
  for (const row of by("settings-table").querySelectorAll("tr:not(:first-child)")) row.hidden = !row.textContent.toLowerCase().includes(words);
});
filter();
