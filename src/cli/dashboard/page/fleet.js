"use strict";
// Engines, their phases over time, versions, and what happened.

const PHASES = { serving: "--good", syncing: "--c0", joining: "--c5", draining: "--c3", lost: "--bad", gone: "--c7" };
const since = (ms, from) => (ms && from ? D.span((ms - from) / 1000) : "–");

function lane(phases, from, to) {
  const box = D.el("div", { className: "lane" });
  phases.forEach(([at, phase], index) => {
    const end = phases[index + 1]?.[0] ?? to;
    const part = D.el("i", { title: `${phase} from ${D.time(at)}, for ${since(end, at)}` });
    part.style.left = (100 * (at - from)) / (to - from) + "%";
    // What was lost for a moment is seen too.
    part.style.width = Math.max((100 * (end - at)) / (to - from), phase === "lost" ? 0.8 : 0.2) + "%";
    part.style.zIndex = phase === "lost" ? 1 : 0;
    part.style.backgroundColor = D.css(PHASES[phase] || "--c7");
    box.append(part);
  });
  return box;
}

function engines(fleet) {
  const all = Object.entries(fleet.engines);
  if (!all.length) return [D.note("No engine is told of.")];
  const last = fleet.facts.reduce((latest, { at_ms }) => Math.max(latest, at_ms), 0);
  const times = all.flatMap(([, { phases }]) => phases.map(([at]) => at));
  const [from, to] = [Math.min(...times), Math.max(last, ...times, Math.min(...times) + 1)];
  const row = ([url, engine]) => {
    const [at, phase] = engine.phases[engine.phases.length - 1] || [0, "unknown"];
    const mark = D.el("i", { className: "dot" });
    mark.style.backgroundColor = D.css(PHASES[phase] || "--c7");
    return D.el("tr", null, D.el("td", null, D.visible(url)), D.el("td", { className: "phase" }, mark, phase), D.el("td", { className: "figure" }, at ? D.time(at) : "–"), D.el("td", { className: engine.lost ? "figure odd" : "figure" }, engine.lost),
      D.el("td", { className: "lanes" }, times.length ? lane(engine.phases, from, to) : "–"), D.el("td", { className: "why" }, D.visible(engine.why || engine.gets).map((part) => (typeof part === "string" ? D.code(part) : part))));
  };
  const head = D.el("tr", null, ["engine", "phase", "since", "lost", times.length ? `${D.time(from)} to ${D.time(to)}` : "", "why, or what it gets"].map((name, index) => D.el("th", { className: [2, 3].includes(index) ? "figure" : "" }, name)));
  return [D.el("div", { className: "wide" }, D.el("table", null, head, all.map(row)))];
}

function newest(fleet) {
  const all = Object.entries(fleet.versions).sort(([one], [other]) => other - one).slice(0, 10);
  if (!all.length) return [D.note("No version is told of.")];
  const row = ([number, version]) => D.el("tr", null, [number, version.step ?? "–", version.published_at_ms ? D.time(version.published_at_ms) : "–", since(version.served_at_ms, version.published_at_ms), version.behind || "–"].map((text) => D.el("td", { className: "figure" }, text)));
  const head = D.el("tr", null, ["version", "step", "published", "served after", "engines behind"].map((name) => D.el("th", { className: "figure" }, name)));
  return [D.el("div", { className: "wide" }, D.el("table", { className: "narrow" }, head, all.map(row)))];
}

// An event's fields in a line.
function words({ at_ms: _, event, ...fields }) {
  if (fields.eval?.sets) fields.eval = Object.entries(fields.eval.sets).map(([set, { reward }]) => `${set} reward ${D.number(reward)}`).join(", ");
  const field = ([name, value]) => `${name === event || name === "what" ? "" : name.replaceAll("_", " ") + " "}${typeof value === "object" ? JSON.stringify(value) : value}`;
  return event.replaceAll("_", " ") + (Object.keys(fields).length ? ": " : "") + Object.entries(fields).filter(([, value]) => value !== "").map(field).join(", ");
}

// The step that was under way at a time: the first that was complete afterwards, or one of those up to it of which the
// page holds no figures. It leads to the time line.
function underWay({ columns, stride }, at) {
  const row = (columns.completed_at_ms || []).findIndex((completed) => completed >= at);
  const step = columns.rollout_id?.[row];
  if (step === undefined) return D.el("span", { className: "at" }, "");
  const first = Math.max(0, (columns.rollout_id[row - 1] ?? step - stride) + 1);
  const words = first < step ? `steps ${first}–${step}` : "step " + step;
  return D.el("span", { className: "at" }, D.el("a", { href: `#time?${new URLSearchParams({ run: D.run(), step })}` }, words));
}

const factLine = (table, fact) => D.el("li", { className: isOdd(fact) ? "odd" : "" }, D.el("time", null, D.time(fact.at_ms)), underWay(table, fact.at_ms), D.el("span", null, D.visible(words(fact))));
const factLines = (table, facts) => D.el("ol", { className: "facts" }, facts.map((fact) => factLine(table, fact)));

// The newest of what went wrong, before all events.
const WRONG_MAX = 20;
const ODD = ["lost", "learner_lost", "skipped", "missed", "log_missing", "other_prompts", "alert"];
const isOdd = (fact) => ODD.includes(fact.event) || fact.phase === "lost" || fact.behind > 0;

D.views.fleet = {
  open(main) {
    this.drawn = "";
    this.choice = D.el("div", { className: "controls" });
    this.body = D.el("div");
    main.append(this.choice, this.body);
  },
  async tick() {
    const run = D.run();
    const fleet = await D.get("fleet", { run });
    await D.metrics(run);
    const table = D.tables[run];
    const now = JSON.stringify([run, fleet, table.epoch, table.rows]);
    if (now === this.drawn) return;
    this.drawn = now;
    this.choice.replaceChildren(...[D.runChoice()].filter(Boolean));
    const facts = fleet.facts.toReversed();
    const more = fleet.dropped ? D.note(`${D.number(fleet.dropped)} earlier events are in events.jsonl.`) : "";
    const wrong = facts.filter(isOdd).slice(0, WRONG_MAX);
    const events = [wrong.length ? [D.el("h2", null, "What went wrong"), factLines(table, wrong)] : "", D.el("h2", null, "Events"), facts.length ? factLines(table, facts) : D.note("None."), more];
    this.body.replaceChildren(D.el("h2", null, "Engines"), ...engines(fleet), D.beside([D.el("h2", null, "Versions"), ...newest(fleet)], events));
  },
};
