"use strict";
// Answers of a step, and one of them token by token.

const KINDS = [["learned", "learned from"], ["left_out", "left out"], ["evaluation", "evaluation"], ["mismatched", "largest mismatch of the run"], ["all", "all of the run"]];
const ORDER = [["worst", "worst first"], ["mismatch", "largest mismatch first"], ["best", "best first"], ["longest", "longest first"], ["shortest", "shortest first"], ["log", "as they came"]];
const FINISHES = [["", "any end"], ["stop", "stop"], ["length", "length"], ["abort", "abort"]];
const SHADES = [["log_prob", "log-prob of the engine"], ["learner", "log-prob of the learner"], ["mismatch", "mismatch"], ["version", "version"], ["mask", "mask"]];
const FILTERS = ["step", "kind", "order", "finish", "reward_min", "reward_max", "length_min", "length_max", "mismatch_min", "version", "failure", "from"];
const order = (query) => query.order || (query.kind === "mismatched" ? "mismatch" : "worst");

// What is known of the answers of one kind alone goes with it.
const pick = (name, choices, chosen, label) =>
  D.el("select", { "aria-label": label, onchange: (event) => D.choose({ ...(name === "kind" ? { failure: "", mismatch_min: "" } : {}), [name]: event.target.value, from: "", position: "" }) },
    choices.map(([value, text]) => D.el("option", { value, selected: value === chosen }, text)));
const field = (name, query, label) =>
  D.el("input", { type: "number", step: "any", placeholder: label, "aria-label": label, value: query[name] ?? "", onchange: (event) => D.choose({ [name]: event.target.value, from: "", position: "" }) });

const versions = (row) => (row.versions ? (row.versions[0] === row.versions[1] ? "v" + row.versions[0] : `v${row.versions[0]}–${row.versions[1]}`) : "–");
const reward = (row) => (row.reward === null ? "none" : D.number(row.reward));

function sampleRow(row, chosen) {
  const cells = [
    D.el("td", { className: "figure" }, reward(row)), D.el("td", { className: "figure" }, D.number(row.tokens)),
    D.el("td", { className: row.finish === "stop" ? "" : "odd" }, row.finish), D.el("td", null, versions(row)),
    D.el("td", { className: "figure" }, D.number(row.mismatch)), D.el("td", { className: "figure" }, row.learned ?? row.seat),
    D.el("td", { className: "figure" }, row.prompt_id), D.el("td", { className: "figure" }, row.seconds === null ? "–" : D.span(row.seconds)),
    D.el("td", { className: "cut" }, D.visible(row.why || row.engine.replace(/^https?:\/\//, ""))),
  ];
  const open = () => D.choose({ position: row.position });
  return D.el("tr", { className: chosen ? "chosen" : "", tabIndex: 0, onclick: open, onkeydown: (event) => event.key === "Enter" && open(), "data-position": row.position }, cells);
}

function lists(list, query) {
  const step = (by) => D.choose({ step: list.step + by, from: "", position: "" });
  const [first, last] = list.steps || [0, 0];
  const bar = D.el("div", { className: "controls" }, D.runChoice(),
    D.el("span", { className: "stepper" }, D.el("button", { "aria-label": "step before", disabled: list.step <= first, onclick: () => step(-1) }, "‹"),
      D.el("label", null, "step ", D.el("input", { type: "number", min: first, max: last, value: list.step, onchange: (event) => D.choose({ step: event.target.value, from: "", position: "" }) })),
      D.el("button", { "aria-label": "step behind", disabled: list.step >= last, onclick: () => step(1) }, "›")),
    pick("kind", KINDS, query.kind || "learned", "which answers"), pick("order", ORDER, order(query), "order"), pick("finish", FINISHES, query.finish || "", "how they ended"),
    field("reward_min", query, "reward from"), field("reward_max", query, "reward to"), field("length_min", query, "tokens from"), field("length_max", query, "tokens to"), field("version", query, "version"), query.kind === "all" ? null : field("mismatch_min", query, "mismatch from"));
  const causes = Object.entries(list.causes).sort(([, one], [, other]) => other - one);
  const failure = (cause, text) => D.el("button", { className: (query.failure || "") === cause ? "chosen" : "", onclick: () => D.choose({ failure: cause, from: "", position: "" }) }, text);
  const told = causes.length ? D.el("div", { className: "group causes" }, failure("", "all"), causes.map(([cause, count]) => failure(cause, [...D.visible(cause), `: ${count}`]))) : null;
  const to = list.from + list.rows.length;
  const gone = list.groups - list.found;
  const where = { mismatched: "all steps, those with the largest mismatch", all: "all steps" }[query.kind] || `step ${list.step}`;
  const words = [list.total ? `${list.from + 1}–${to} of ${list.total} answers of ${where}` : `no such answers of ${where}`];
  if (list.looked !== null) words.push(`${D.number(list.looked)} were looked at` + (list.total > to ? ", the first are listed" : ""));
  if (causes.length) words.push("groups that no step learns from, by why");
  if (list.untold) words.push("mismatches are missing: " + list.untold);
  if (gone > 0) words.push(`${gone} of ${list.groups} groups are no longer in the log: retention has removed them`);
  if (list.cut) words.push("only the part of the log around the step was looked at");
  const turn = (from, text) => D.el("button", { onclick: () => D.choose({ from, position: "" }) }, text);
  const pages = [list.from > 0 ? turn(Math.max(0, list.from - 200), "before") : null, to < list.total && list.looked === null ? turn(to, "more") : null];
  const head = D.el("tr", null, ["reward", "tokens", "end", "version", "mismatch", "step", "prompt", "took", query.kind === "left_out" ? "why" : "engine"].map((name, index) => D.el("th", { className: [0, 1, 4, 5, 6, 7].includes(index) ? "figure" : "" }, name)));
  const table = D.el("table", { className: "rows" }, head, list.rows.map((row) => sampleRow(row, String(row.position) === query.position)));
  return [bar, D.el("p", { className: "note" }, words.join("; ") + ". ", pages), told, D.el("div", { className: "wide list" }, table)].filter(Boolean);
}

// Colours behind tokens, and what each says.
function shades(one, by) {
  const known = [...new Set(one.spans.map(([version]) => version))].sort((a, b) => a - b);
  const version = (token) => one.spans.find(([, from, to]) => token >= from && token < to)?.[0];
  const bad = D.css("--bad");
  const more = D.css("--c0");
  const learner = (token) => one.learner_log_probs[token] ?? null;
  const mismatch = (token) => (learner(token) === null ? null : learner(token) - one.log_probs[token]);
  const hex = (share) => Math.round(255 * Math.min(Math.max(share, 0), 0.75)).toString(16).padStart(2, "0");
  const colour = (token) => {
    if (by === "mask") return one.mask[token] === 0 ? D.css("--c7") + "55" : "";
    if (by === "version") return version(token) === undefined ? "" : D.colour(known.indexOf(version(token))) + "40";
    if (by === "mismatch") return Math.abs(mismatch(token)) < 0.01 ? "" : (mismatch(token) < 0 ? bad : more) + hex(Math.abs(mismatch(token)));
    const value = by === "learner" ? learner(token) : one.log_probs[token];
    return value === undefined || value === null || value > -0.02 ? "" : bad + hex(-value / 6);
  };
  const say = (token) => {
    const value = one.log_probs[token];
    return [`token ${token}`, value === undefined ? null : `log-prob ${value.toFixed(4)}, p ${Math.exp(value).toPrecision(3)}`,
      learner(token) === null ? null : `learner ${learner(token).toFixed(4)}, mismatch ${mismatch(token).toFixed(4)}`,
      version(token) === undefined ? null : `version ${version(token)}`, one.mask[token] === 0 ? "not trained on" : null].filter(Boolean).join(" · ");
  };
  const keys = { mask: [["", "trained on"], [D.css("--c7") + "55", "not trained on"]], version: known.map((number, index) => [D.colour(index) + "40", "version " + number]),
    mismatch: [["", "the same"], [bad + hex(0.1), "learner lower by 0.1"], [bad + hex(0.5), "by 0.5"], [more + hex(0.1), "higher by 0.1"], [more + hex(0.5), "by 0.5"]],
    log_prob: [0.05, 0.5, 0.1, 0.01].map((p, index) => (index ? [bad + hex(-Math.log(p) / 6), "p " + p] : ["", "p near 1"])) };
  return { colour, say, keys: keys[by] || keys.log_prob };
}

function tokens(one, by, told) {
  const { colour, say, keys } = shades(one, by);
  const legend = keys.map(([shade, text]) => {
    const key = D.el("span", { className: "key" }, text);
    key.style.backgroundColor = shade;
    return key;
  });
  const box = D.el("pre", { className: "answer" });
  one.texts.forEach((text, index) => {
    const shade = colour(index);
    // A token without a text, such as that of the end, has a colour too.
    const token = D.el("span", { "data-token": index }, one.untold ? text + " " : D.visible(text || (shade && "·")));
    if (shade) token.style.backgroundColor = shade;
    box.append(token);
  });
  box.addEventListener("pointerover", (event) => {
    const index = event.target.closest("[data-token]")?.dataset.token;
    if (index !== undefined) told.textContent = say(Number(index));
  });
  return [D.el("p", { className: "legend" }, legend), box];
}

function detail(one, query) {
  const facts = [["reward", reward(one) + (one.raw_reward === null ? "" : ` (given ${D.number(one.raw_reward)})`)], ["label", one.label === null ? null : typeof one.label === "string" ? one.label : JSON.stringify(one.label)],
    ["end", `${one.finish} after ${D.number(one.tokens)} tokens` + (one.seconds === null ? "" : ", " + D.span(one.seconds))], ["version", versions(one)], ["engine", one.engine], ["prompt", `${one.prompt_id}, ${D.number(one.prompt_tokens)} tokens`], ["source", one.source],
    ["set", one.set], ["left out", one.why], ["mismatch", one.mismatch === null ? null : `up to ${D.number(one.mismatch)} nats, in step ${one.learned}`], ["mask", one.masked ? "none of it is trained on" : null]];
  const list = D.el("dl", null, facts.filter(([, text]) => text).map(([name, text]) => [D.el("dt", null, name), D.el("dd", null, D.visible(String(text)))]));
  const told = D.el("span", { className: "hint" }, "point at a token");
  const place = D.el("div");
  const by = sessionStorage.getItem("shade") || "log_prob";
  const shade = D.el("select", { "aria-label": "colours", onchange: (event) => {
    sessionStorage.setItem("shade", event.target.value);
    place.replaceChildren(...tokens(one, event.target.value, told));
  } }, SHADES.map(([value, text]) => D.el("option", { value, selected: value === by }, text)));
  place.append(...tokens(one, by, told));
  const group = one.group.map((row) => D.el("button", { className: String(row.position) === query.position ? "chosen" : "", title: `${row.finish}, ${row.tokens} tokens`, onclick: () => D.choose({ position: row.position }) }, reward(row)));
  const again = one.again.map((row) => D.el("button", { title: `${row.answers} answers`, onclick: () => D.choose({ step: row.step, position: row.position, from: "" }) }, `step ${row.step}: ${D.number(row.reward)}`));
  const beyond = one.tokens - one.texts.length;
  return [D.el("button", { className: "close", "aria-label": "close", onclick: () => D.choose({ position: "" }) }, "×"), list,
    group.length > 1 ? [D.el("h3", null, "Its group"), D.el("div", { className: "group" }, group)] : null,
    again.length ? [D.el("h3", null, "The same prompt at other steps, and its mean reward"), D.el("div", { className: "group again" }, again)] : null,
    D.el("h3", null, "Prompt"), one.prompt === null ? D.note(one.untold) : D.el("pre", null, D.visible(one.prompt)),
    D.el("h3", null, "Answer "), D.el("div", { className: "controls" }, shade, told), place, beyond > 0 ? D.note(`${beyond} more tokens are not shown.`) : null].flat(2).filter(Boolean);
}

D.views.samples = {
  open(main) {
    this.asked = this.answered = "";
    this.list = D.el("div", { className: "lists" });
    this.one = D.el("aside", { hidden: true });
    main.append(this.list, this.one);
  },
  async tick(_, query) {
    const run = D.run();
    const ask = { run, order: order(query) };
    for (const name of FILTERS) if (query[name]) ask[name] = query[name];
    // A list that was chosen does not change under the reader's eyes.
    const now = JSON.stringify([ask, query.step ? "" : D.runs[run]?.steps]);
    if (now !== this.asked) {
      try {
        const list = await D.get("samples", ask);
        this.list.replaceChildren(...lists(list, query));
      } catch (error) {
        this.list.replaceChildren(D.el("div", { className: "controls" }, D.runChoice()), D.note(error.message));
      }
      this.asked = now;
    }
    for (const row of this.list.querySelectorAll("tr[data-position]")) row.classList.toggle("chosen", row.dataset.position === query.position);
    const position = [run, query.position].join();
    if (position === this.answered) return;
    this.answered = position;
    this.one.hidden = !query.position;
    if (!query.position) return;
    try {
      this.one.replaceChildren(...detail(await D.get("sample", { run, position: query.position }), query));
    } catch (error) {
      this.one.replaceChildren(D.note(error.message));
    }
    this.one.scrollTop = 0;
  },
  // j and k go through the list.
  key(event) {
    const by = { j: 1, k: -1 }[event.key];
    const rows = [...this.list.querySelectorAll("tr[data-position]")];
    if (!by || !rows.length) return;
    const at = rows.findIndex((row) => row.classList.contains("chosen"));
    const row = rows[Math.min(Math.max(at + by, 0), rows.length - 1)];
    row.scrollIntoView({ block: "nearest" });
    D.choose({ position: row.dataset.position });
  },
};
