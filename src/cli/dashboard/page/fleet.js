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

// How an engine came by its weights, and why; what stands before is why it is not as one wants it.
function came({ how, compared, error, up, paused, label }, host) {
  const state = !up ? "does not answer" : label === host.label ? "in step" : "out of step";
  const by = typeof how === "string" ? how : how?.loaded ? "loaded" : "–";
  const why = [error, how?.loaded?.why, compared?.not ? "not compared: " + compared.not.why : null].filter(Boolean);
  return [paused ? state + ", paused" : state, by, why.join("; ")];
}

// Hosts with their engines, by what followers wrote into the store; of hosts that figures alone tell of, their last version.
function hosts(fleet, found) {
  const told = found?.hosts || [];
  const figure = (text) => D.el("td", { className: "figure" }, text);
  const row = (host) => host.engines.map((engine, index) => {
    const [state, by, why] = came(engine, host);
    return D.el("tr", null, D.el("td", null, index ? "" : D.visible(host.host)), figure(index ? "" : host.version), figure(index || host.age_seconds === null ? "" : D.span(host.age_seconds) + " ago"), D.el("td", null, D.visible(engine.url)),
      D.el("td", { className: state === "in step" ? "" : "odd" }, state), figure(engine.pause_ms === null ? "–" : D.span(engine.pause_ms / 1000)), D.el("td", null, by), D.el("td", { className: "why" }, D.visible(why)));
  });
  const bare = told.filter(({ engines }) => !engines.length).map((host) => D.el("tr", null, D.el("td", null, D.visible(host.host)), figure(host.version), figure(host.age_seconds === null ? "" : D.span(host.age_seconds) + " ago"), D.el("td", { colSpan: 5 }, "no engine")));
  const took = (phases) => Object.entries(phases).reduce((sum, [name, ms]) => sum + (name.endsWith("_ms") && name !== "began_at_ms" ? ms : 0), 0);
  const others = Object.entries(fleet.hosts || {}).filter(([host]) => !told.some((other) => other.host === host));
  const rest = others.map(([host, phases]) => D.el("tr", null, D.el("td", null, D.visible(host)), figure(phases.version), figure(""), D.el("td", { colSpan: 5 }, `took ${D.span(took(phases) / 1000)}, as the trainer was told`)));
  const rows = [told.map(row).flat(), bare, rest].flat();
  const head = D.el("tr", null, ["host", "version", "told", "engine", "state", "pause", "by", "why"].map((name) => D.el("th", { className: ["version", "told", "pause"].includes(name) ? "figure" : "" }, name)));
  return rows.length ? D.el("div", { className: "wide hosts" }, D.el("table", null, head, rows)) : D.note("No follower has told of its host.");
}

// The last figure of a name, and the one some rows before it by the same process.
function figures({ columns, rows }) {
  const at = (name, row) => columns[name]?.[row] ?? null;
  const began = at("goodput.began_at_ms", rows - 1);
  let before = rows - 1;
  while (before > 0 && rows - before <= 20 && at("goodput.began_at_ms", before - 1) === began) before--;
  const since = (name) => (at(name, rows - 1) ?? 0) - (at(name, before) ?? 0);
  const seconds = since("completed_at_ms") / 1000;
  const last = (name) => (columns[name] || []).findLast((value) => value !== null) ?? null;
  const told = [["places of engines", began !== null && seconds > 0 ? D.number(since("goodput.places_s") / seconds) : null],
    ["longest pause for a version", last("publication.pause_ms") === null ? null : D.span(last("publication.pause_ms") / 1000)],
    ["prefix tokens of older weights", began === null ? null : `${D.number(at("goodput.tokens.stale_prefix", rows - 1) ?? 0)} of ${D.number(at("goodput.tokens.cached", rows - 1) ?? 0)} from prefix caches`]];
  return D.el("dl", { className: "figures" }, told.filter(([, text]) => text !== null).map(([name, text]) => [D.el("dt", null, name), D.el("dd", null, text)]));
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
    const store = D.exported ? {} : await D.get("store", { run });
    const now = JSON.stringify([run, fleet, table.epoch, table.rows, store]);
    if (now === this.drawn) return;
    this.drawn = now;
    this.choice.replaceChildren(...[D.runChoice()].filter(Boolean));
    const facts = fleet.facts.toReversed();
    const more = fleet.dropped ? D.note(`${D.number(fleet.dropped)} earlier events are in events.jsonl.`) : "";
    const wrong = facts.filter(isOdd).slice(0, WRONG_MAX);
    const events = [wrong.length ? [D.el("h2", null, "What went wrong"), factLines(table, wrong)] : "", D.el("h2", null, "Events"), facts.length ? factLines(table, facts) : D.note("None."), more];
    this.body.replaceChildren(D.el("h2", null, "Engines"), ...engines(fleet), figures(table), D.el("h2", null, "Hosts"), hosts(fleet, store.found), store.unreachable ? D.el("p", { className: "odd" }, D.visible(store.unreachable)) : "", D.beside([D.el("h2", null, "Versions"), ...newest(fleet)], events));
  },
};
