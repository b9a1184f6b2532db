"use strict";
// Figures of one run, or of several over each other.

// Groups in the order in which one looks; `*` stands for a name.
const GROUPS = [
  ["Reward", ["reward", "reward_learned", "rewards.*", "pass", "eval.sets.*.reward", "eval.sets.*.pass_1", "eval.sets.*.pass"]],
  ["Answers", ["response_length", "truncated", "groups_zero_std", "groups_failed", "answers_failed.*", "groups_filtered", "eval.sets.*.response_length", "eval.sets.*.truncated"]],
  ["Policy", ["entropy", "ppo_kl", "kl_loss", "kl", "opd_reverse_kl", "pg_clipfrac", "tis_clipfrac", "rs_clipfrac", "opsm_clipfrac"]],
  ["Staleness", ["staleness_mean", "staleness_max", "tokens_too_old", "groups_too_old"]],
  ["Engines against learner", ["log_prob_diff_mean", "log_prob_diff_p99", "log_prob_diff_max", "mismatch_k3", "log_prob_diff_by_engine.*"]],
  ["Optimiser", ["loss", "grad_norm", "lr", "skipped", "value_loss", "value_clipfrac", "critic_grad_norm", "critic_lr"]],
  ["Weights", ["publication.publication_bytes", "publication.density", "publication.encode_publish_ms", "publication.prepare_ms", "publication.pause_ms", "publication.convergence_ms", "publication.engines_behind"]],
  ["Time", ["wall_ms", "generate_ms", "train_ms", "train_wait_ms", "rollout_wait_ms", "weights_ms", "rollout_tokens_per_s", "train_tokens_per_s", "mfu", "tokens"]],
];
const TITLES = {
  reward: "reward", reward_learned: "reward, as learned from", pass: "prompts with a right answer", response_length: "tokens of an answer", truncated: "cut off at the limit",
  groups_zero_std: "groups of one reward", groups_failed: "groups that failed", groups_filtered: "groups filtered out",
  entropy: "entropy", ppo_kl: "KL to the old policy", kl_loss: "KL to the reference (loss)", kl: "KL to the reference (reward)",
  pg_clipfrac: "ratios clipped", tis_clipfrac: "importance weights cut", staleness_mean: "steps old, mean", staleness_max: "steps old, at most",
  tokens_too_old: "tokens too old to train on", groups_too_old: "groups too old", log_prob_diff_mean: "|Δ log-prob|, mean",
  log_prob_diff_p99: "|Δ log-prob|, 99 % below", log_prob_diff_max: "|Δ log-prob|, largest", mismatch_k3: "KL(engine ‖ learner), k3",
  grad_norm: "gradient norm", lr: "learning rate", skipped: "steps left out", "publication.publication_bytes": "bytes published",
  "publication.density": "elements changed", "publication.encode_publish_ms": "publish, ms", "publication.prepare_ms": "prepare, ms",
  "publication.pause_ms": "pause, ms", "publication.convergence_ms": "until all serve it, ms", "publication.engines_behind": "engines behind",
  wall_ms: "step, ms", generate_ms: "generate, ms", train_ms: "train, ms", train_wait_ms: "learner waits, ms", rollout_wait_ms: "engines wait, ms",
  weights_ms: "weights cost, ms", rollout_tokens_per_s: "generated tokens/s", train_tokens_per_s: "trained tokens/s", mfu: "MFU", tokens: "tokens of a step",
};
// Ids, times and what another view shows.
const APART = /^(rollout_id|completed_at_ms|tokens_done|max_staleness|goodput\..*|publication\.(version|committed_at_ms))$/;
const title = (name) => {
  const set = name.match(/^eval\.sets\.(.*)\.(\w+)$/);
  if (set) return `${set[1]}: ${set[2] === "pass_1" ? "pass@1" : TITLES[set[2]] || set[2].replaceAll("_", " ")}`;
  const engine = name.match(/^log_prob_diff_by_engine\.(?:https?:\/\/)?(.*)$/);
  if (engine) return "|Δ log-prob|, mean: " + engine[1];
  const source = name.match(/^rewards\.(.*)$/);
  return source ? `reward: ${source[1]}` : TITLES[name] || name.replaceAll("_", " ").replace("publication.", "");
};

const settings = { x: "step", smooth: 0, log: false, zeros: false };
let charts = [];
let wanted = "";

const stored = () => {
  try {
    Object.assign(settings, JSON.parse(sessionStorage.getItem("run") || "{}"));
  } catch { /* A browser that keeps nothing. */ }
};
const store = () => {
  try {
    sessionStorage.setItem("run", JSON.stringify(settings));
  } catch { /* Likewise. */ }
};

// Where a run's rows stand on the horizontal axis.
function places(table) {
  const { rollout_id: steps = [], completed_at_ms: times = [], tokens_done: tokens = [] } = table.columns;
  if (settings.x === "time") return times.map((at) => (at ? at / 1000 : null));
  return settings.x === "tokens" ? tokens : steps;
}

// A mean that forgets, and that begins where the figures do.
function smoothed(values, share) {
  let sum = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = share * sum + (1 - share) * value;
    weight = share * weight + (1 - share);
    return sum / weight;
  });
}

// The lines of a figure: of each run the values, and those smoothed above them.
function lines(name) {
  const tables = [];
  D.runs.forEach((_, run) => {
    const table = D.tables[run];
    const x = table ? places(table) : [];
    let y = (table && table.columns[name]) || new Array(x.length).fill(null);
    if (settings.log) y = y.map((value) => (value > 0 ? value : null));
    const rows = x.map((_, row) => row).filter((row) => x[row] !== null && y[row] !== null);
    const [xs, ys] = [rows.map((row) => x[row]), rows.map((row) => y[row])];
    tables.push(settings.smooth ? [xs, ys, smoothed(ys, settings.smooth)] : [xs, ys]);
  });
  return tables.length === 1 ? tables[0] : uPlot.join(tables);
}

let syncing = false;
function chart(name, box) {
  const value = D.el("span", { className: "value" });
  const body = D.el("div", { className: "plot" });
  box.append(D.el("h3", { title: name }, title(name), value), body);
  const [ink, faint] = [D.css("--soft"), D.css("--line")];
  const series = [{}];
  D.runs.forEach((_, run) => {
    const stroke = D.colour(run);
    if (settings.smooth) series.push({ stroke: stroke + "50", width: 1, points: { show: false }, spanGaps: true });
    series.push({ stroke, width: 1.5, points: { show: (plot, index) => plot.data[index].filter((y) => y !== null && y !== undefined).length < 30, size: 4 }, spanGaps: true });
  });
  const axis = { stroke: ink, font: "11px system-ui, sans-serif", grid: { stroke: faint, width: 1 }, ticks: { show: false } };
  const seen = (plot) => {
    const row = plot.cursor.idx;
    const every = settings.smooth ? 2 : 1;
    const last = (values) => values.findLast((y) => y !== null && y !== undefined);
    const read = D.runs.map((_, run) => plot.data[every * (run + 1)]).map((values) => (row === null || row === undefined ? last(values) : values[row]));
    value.replaceChildren(...read.map((one, run) => {
      const text = D.el("span", null, D.number(one));
      if (D.runs.length > 1) text.style.color = D.colour(run);
      return text;
    }));
  };
  const zoom = (plot, scale) => {
    if (scale !== "x" || syncing || plot.status !== 1) return;
    syncing = true;
    const { min, max } = plot.scales.x;
    for (const other of charts) if (other.plot && other.plot !== plot) other.plot.setScale("x", { min, max });
    syncing = false;
  };
  const options = {
    width: body.clientWidth, height: 150, legend: { show: false }, padding: [8, 8, 0, 0], series,
    cursor: { sync: { key: "run" }, points: { size: 5 }, y: false },
    scales: { x: { time: settings.x === "time" }, y: settings.log ? { distr: 3 } : {} },
    axes: [{ ...axis, size: 22, grid: { show: false }, values: settings.x === "time" ? undefined : (_, ticks) => ticks.map(D.number) },
      { ...axis, size: 52, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : D.number(tick))) }],
    hooks: { setCursor: [seen], setScale: [zoom] },
  };
  const plot = new uPlot(options, lines(name), body);
  seen(plot);
  return { plot, seen };
}

function refresh(one) {
  one.plot.setData(lines(one.name), one.isWhole());
  one.seen(one.plot);
}

// Charts are drawn once they come into sight.
const sight = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    const one = charts.find(({ box }) => box === target);
    if (!isIntersecting || !one || one.plot) continue;
    Object.assign(one, chart(one.name, one.box));
    one.isWhole = () => {
      const xs = one.plot.data[0];
      const { min, max } = one.plot.scales.x;
      return min === null || min === undefined || (min <= xs[0] && max >= xs[xs.length - 1]);
    };
  }
}, { rootMargin: "200px" });

const widths = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const one = charts.find(({ box }) => box === target);
    const width = target.querySelector(".plot")?.clientWidth;
    if (one?.plot && width && width !== one.plot.width) one.plot.setSize({ width, height: 150 });
  }
});

// Whether two figures say the same of all runs, as pass@1 and the mean of rewards that are 0 or 1.
function isSame(one, other) {
  return D.tables.every((table) => {
    const [a, b] = [table?.columns[one], table?.columns[other]];
    return a === b || (a && b && a.every((value, row) => value === b[row]));
  });
}

function names() {
  const all = new Map();
  for (const table of D.tables) {
    for (const [name, values] of Object.entries(table?.columns || {})) {
      if (!APART.test(name)) all.set(name, all.get(name) || values.some((value) => value));
    }
  }
  const left = new Set(all.keys());
  const groups = GROUPS.map(([group, patterns]) => {
    const found = [];
    for (const pattern of patterns) {
      const like = new RegExp("^" + pattern.replaceAll(".", "\\.").replace("*", ".+") + "$");
      for (const name of [...left].sort().filter((name) => like.test(name))) {
        left.delete(name);
        const isTold = name.startsWith("eval.") && found.some((other) => other.startsWith("eval.") && isSame(name, other));
        if (!isTold) found.push(name);
      }
    }
    return [group, found];
  });
  groups.push(["More", [...left].sort()]);
  const zeros = [...all].filter(([, has]) => !has).length;
  const kept = groups.map(([group, found]) => [group, found.filter((name) => settings.zeros || all.get(name))]);
  return { groups: kept.filter(([, found]) => found.length), zeros };
}

function draw(place) {
  sight.disconnect();
  widths.disconnect();
  for (const { plot } of charts) plot?.destroy();
  charts = [];
  const { groups, zeros } = names();
  wanted = JSON.stringify([groups, D.runs.length]);
  const sections = groups.map(([group, found]) => {
    const boxes = found.map((name) => {
      const box = D.el("figure", { className: "chart" });
      charts.push({ name, box });
      return box;
    });
    return D.el("section", null, D.el("h2", null, group), D.el("div", { className: "charts" }, boxes));
  });
  const hidden = zeros && !settings.zeros ? D.el("button", { className: "quiet", onclick: () => {
    settings.zeros = true;
    draw(place);
  } }, `show ${zeros} figures that are 0 throughout`) : null;
  place.replaceChildren(...sections, ...(hidden ? [hidden] : []));
  if (!groups.length) place.append(D.note("No step is complete yet."));
  for (const { box } of charts) sight.observe(box), widths.observe(box);
}

// The flags of the runs, those that differ first.
function flags() {
  const all = [...new Set(D.runs.flatMap((run) => Object.keys(run.settings)))].sort();
  const of = (flag) => D.runs.map((run) => run.settings[flag] ?? "");
  const differs = (flag) => new Set(of(flag)).size > 1;
  const row = (flag) => D.el("tr", { className: differs(flag) ? "differs" : "" }, D.el("th", { scope: "row" }, "--" + flag), of(flag).map((text) => D.el("td", null, D.visible(text))));
  const several = D.runs.length > 1;
  const table = (flags) => D.el("div", { className: "wide" }, D.el("table", null, several ? D.el("tr", null, D.el("th"), D.runs.map((run) => D.el("th", null, run.name))) : null, flags.map(row)));
  const folded = (label, open, ...parts) => D.el("details", { className: "flags", open }, D.el("summary", null, label), parts);
  const [other, same] = [all.filter(differs), all.filter((flag) => !differs(flag))];
  const told = D.runs.map((run) => (run.told ? D.note(run.told) : null));
  if (!several) return folded(`Settings: ${all.length} flags`, false, told, table(all));
  return folded(`Settings: ${other.length} of ${all.length} flags differ`, other.length > 0 && other.length < 9, table(other), folded("the same in all", false, told, table(same)));
}

function heads() {
  return D.runs.map((run, index) => {
    const mark = D.el("i", { className: "dot" });
    mark.style.backgroundColor = D.colour(index);
    const step = run.of ? `step ${run.steps} of ${run.of}` : `${run.steps} steps`;
    const model = run.settings["hf-checkpoint"];
    return D.el("p", { className: "head" }, D.runs.length > 1 ? mark : null, D.el("b", null, run.name), D.el("span", null, step),
      model ? D.el("span", null, model) : null, run.settings.seed ? D.el("span", null, "seed " + run.settings.seed) : null, D.el("span", { className: "dir" }, run.dir));
  });
}

function controls(redraw) {
  const radio = ["step", "time", "tokens"].map((name) => D.el("option", { value: name, selected: settings.x === name }, name));
  const change = (act) => (event) => {
    act(event.target);
    store();
    redraw();
  };
  return D.el("div", { className: "controls" },
    D.el("label", null, "along ", D.el("select", { onchange: change((field) => (settings.x = field.value)) }, radio)),
    D.el("label", null, "smooth ", D.el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: settings.smooth, onchange: change((field) => (settings.smooth = Number(field.value))) })),
    D.el("label", null, D.el("input", { type: "checkbox", checked: settings.log, onchange: change((field) => (settings.log = field.checked)) }), " log scale"),
    D.el("span", { className: "hint" }, "drag to zoom, double click to go back"));
}

D.views.run = {
  open(main) {
    stored();
    const place = D.el("div");
    this.head = D.el("div");
    this.flags = D.el("div");
    this.place = place;
    this.told = "";
    wanted = "";
    main.append(this.head, this.flags, controls(() => draw(place)), place);
  },
  async tick() {
    const changed = await Promise.all(D.runs.map((_, run) => D.metrics(run)));
    const told = JSON.stringify(D.runs.map(({ settings: flags, told: text }) => [flags, text]));
    this.head.replaceChildren(...heads());
    if (told !== this.told) {
      this.flags.replaceChildren(flags());
      this.told = told;
    }
    const { groups } = names();
    if (wanted !== JSON.stringify([groups, D.runs.length])) draw(this.place);
    else if (changed.some((is) => is)) for (const one of charts) if (one.plot) refresh(one);
  },
};
