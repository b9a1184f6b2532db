"use strict";
// Where the time of the engines' places went: shares of 100 % over the steps, and what would mend the largest loss.

const BARS = 120;
const GOOD = ["trained", "evaluated", "waiting for a step", "under way"];
const OWN = { trained_s: "trained", waiting_s: "waiting for a step", evaluated_s: "evaluated", prefill_s: "prompts read", under_way_s: "under way" };
const OF = { left_out_s: "left out", lost_s: "lost", prefill_again_s: "read again", idle_s: "idle" };
const MENDS = [
  ["idle: no request", "Engines had room and nothing to do while the learner worked. `--train-async` or `--max-staleness 1` lets them generate meanwhile; `--over-sampling-batch-size` keeps more prompts under way."],
  ["idle: behind the version", "Engines waited for new weights. `follow --plugin auto` patches them in place, `--update-weight-transport nccl` pushes, and `--update-weights-interval` makes versions rarer."],
  ["idle: down", "Engines did not answer. The Fleet view says which and why; `driftless doctor` looks at their hosts."],
  ["idle: draining", "Engines were to leave. `driftless fleet drain --deadline` bounds how long that takes."],
  ["idle", "Engines stood still. The Fleet view says which."],
  ["lost: engine failed", "Engines failed under their requests. The Fleet view says which; a longer `--generate-deadline` helps where they were only slow."],
  ["lost: engine removed", "Engines left with requests under way. `driftless fleet drain` lets them finish first."],
  ["lost: crossed by an update", "Weights changed within answers. The wheel's plugin tells which weights drew which token, so that these are kept."],
  ["lost: aborted", "Answers were given up before they ended. `--partial-rollout` lets them go on behind the update."],
  ["lost: given up", "Answers were given up before they ended. `--partial-rollout` lets them go on behind the update."],
  ["lost: too old", "Engines drew with weights that were too old. `--max-staleness` says how old they may be."],
  ["lost", "Tokens were thrown away. events.jsonl and the Fleet view say what happened then."],
  ["left out: too old", "Tokens were older than the run trains on. A larger `--max-staleness`, or fewer engines, wastes less."],
  ["left out: filtered", "The filter left whole groups out. Prompts that are neither always right nor always wrong waste less."],
  ["left out", "No step learns from these answers. The Samples view says why, under “left out”."],
  ["read again", "Prompts were read again behind a change. Engines that keep their prefix cache, or rarer versions, read less."],
  ["prompts read", "Most time went into reading prompts. More samples of a prompt (`--n-samples-per-prompt`) share that."],
];

// Seconds of each part between one row and the next, by process: a new one begins at 0.
function spent(table) {
  const { columns, rows } = table;
  const began = columns["goodput.began_at_ms"];
  if (!began) return null;
  const parts = {};
  for (const [name, values] of Object.entries(columns)) {
    const [, kind, why] = name.match(/^goodput\.(\w+_s)(?:\.(.+))?$/) || [];
    const part = why ? OF[kind] && `${OF[kind]}: ${why}` : OWN[kind];
    if (part) parts[part] = values;
  }
  const taken = {};
  for (const [part, values] of Object.entries(parts)) {
    let before = 0;
    let process = null;
    taken[part] = new Array(rows).fill(0);
    for (let row = 0; row < rows; row++) {
      if (began[row] === null || values[row] === null) continue;
      if (process !== began[row]) [before, process] = [0, began[row]];
      taken[part][row] = values[row] - before;
      before = values[row];
    }
  }
  return taken;
}

// Sums over windows of rows. What waited and was trained on then leaves the window that it waited in less.
function windows(taken, rows) {
  const size = Math.max(1, Math.ceil(rows / BARS));
  const all = [];
  for (let from = 0; from < rows; from += size) {
    const to = Math.min(rows, from + size);
    const sums = {};
    let whole = 0;
    for (const [part, values] of Object.entries(taken)) {
      let sum = 0;
      for (let row = from; row < to; row++) sum += values[row];
      sums[part] = Math.max(0, sum);
      whole += sums[part];
    }
    all.push({ from, to, sums, whole });
  }
  return all;
}

const shade = (part, order) => {
  if (part === "trained") return D.css("--good");
  if (part === "evaluated") return D.css("--c5");
  if (part === "waiting for a step") return D.css("--c0");
  if (part === "prompts read") return D.css("--c3");
  if (part === "under way") return D.css("--c7");
  const kind = part.split(":")[0];
  return D.css({ idle: "--idle", lost: "--bad", "left out": "--c1", "read again": "--c6" }[kind] || "--c4") + ["", "c0", "90", "60"][order % 4];
};

function paint(canvas, all, order, colours) {
  const ratio = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  [canvas.width, canvas.height] = [width * ratio, height * ratio];
  const draw = canvas.getContext("2d");
  draw.scale(ratio, ratio);
  const step = width / all.length;
  all.forEach(({ sums, whole }, index) => {
    let top = height;
    for (const part of order) {
      const tall = whole ? (height * (sums[part] || 0)) / whole : 0;
      draw.fillStyle = colours[part];
      draw.fillRect(index * step, top - tall, Math.max(step - (step > 5 ? 1 : 0), 0.5), tall);
      top -= tall;
    }
  });
}

function advice(total, whole) {
  const losses = Object.entries(total).filter(([part, time]) => !GOOD.includes(part) && time > 0);
  if (!losses.length) return D.note("No time was lost.");
  const [part, time] = losses.reduce((one, other) => (other[1] > one[1] ? other : one));
  const [, mend] = MENDS.find(([name]) => part.startsWith(name)) || [null, ""];
  const share = ((100 * time) / whole).toFixed(1);
  return D.el("p", { className: "advice" }, D.el("b", null, `The largest loss is ${share} %: ${part}. `), D.code(mend));
}

D.views.goodput = {
  open(main) {
    this.drawn = "";
    this.choice = D.el("div", { className: "controls" });
    this.body = D.el("div");
    main.append(this.choice, this.body);
    this.sized = new ResizeObserver(() => this.again?.());
    this.sized.observe(this.body);
  },
  async tick() {
    const run = D.run();
    await D.metrics(run);
    const table = D.tables[run];
    const now = [run, table.epoch, table.rows].join();
    if (now === this.drawn) return;
    this.drawn = now;
    this.choice.replaceChildren(...[D.runChoice()].filter(Boolean));
    const taken = spent(table);
    this.again = null;
    if (!taken) return this.body.replaceChildren(D.note("The steps of this run do not say where the time of engines went: no engine was asked, or an earlier release wrote them."));
    const all = windows(taken, table.rows);
    const total = {};
    for (const { sums } of all) for (const [part, time] of Object.entries(sums)) total[part] = (total[part] || 0) + time;
    const whole = Object.values(total).reduce((sum, time) => sum + time, 0);
    const rank = (part) => { const place = GOOD.indexOf(part); return place < 0 ? GOOD.length : place; };
    const order = Object.keys(total).filter((part) => total[part] > 0).sort((a, b) => rank(a) - rank(b) || total[b] - total[a]);
    const kinds = {};
    const colours = Object.fromEntries(order.map((part) => {
      const kind = part.split(":")[0];
      kinds[kind] = (kinds[kind] ?? -1) + 1;
      return [part, shade(part, kinds[kind])];
    }));
    this.show(table, all, total, whole, order, colours);
  },
  show(table, all, total, whole, order, colours) {
    const canvas = D.el("canvas", { className: "stack" });
    canvas.setAttribute("aria-label", "shares of the time of engines' places over the steps");
    const steps = table.columns.rollout_id;
    const said = D.el("th", { className: "figure" });
    const cells = {};
    const percent = (time, of) => (of ? ((100 * time) / of).toFixed(1) + " %" : "–");
    const rows = order.toReversed().map((part) => {
      const mark = D.el("i", { className: "dot" });
      mark.style.backgroundColor = colours[part];
      cells[part] = D.el("td", { className: "figure" });
      return D.el("tr", null, D.el("td", null, mark, part), D.el("td", { className: "figure" }, percent(total[part], whole)), cells[part]);
    });
    const point = (index) => {
      const { from, to, sums, whole: of } = all[index];
      said.textContent = to - from > 1 ? `steps ${steps[from]}–${steps[to - 1]}` : `step ${steps[from]}`;
      for (const part of order) cells[part].textContent = percent(sums[part] || 0, of);
    };
    canvas.addEventListener("pointermove", (event) => {
      const at = Math.floor((event.offsetX / canvas.clientWidth) * all.length);
      point(Math.min(Math.max(at, 0), all.length - 1));
    });
    const ends = D.el("div", { className: "ends" }, D.el("span", null, "step " + steps[0]), D.el("span", null, "step " + steps[steps.length - 1]));
    this.body.replaceChildren(advice(total, whole), D.el("h2", null, "Places of the engines"), canvas, ends,
      D.el("div", { className: "wide" }, D.el("table", { className: "parts" }, D.el("tr", null, D.el("th", null, `${D.span(whole)} of places`), D.el("th", { className: "figure" }, "whole run"), said), rows)));
    this.again = () => paint(canvas, all, order, colours);
    point(all.length - 1);
    this.again();
  },
};
