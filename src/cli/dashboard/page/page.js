"use strict";
// What the views share: elements, figures, the run's data, tabs with their state in the address.

const D = { views: {}, runs: [], tables: [], exported: null };

// An element. Texts come from policies and files: they are only ever text.
D.el = (tag, props, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && name !== "list") node[name] = value;
    else node.setAttribute(name, value);
  }
  for (const child of children.flat(2)) if (child !== null && child !== undefined) node.append(child);
  return node;
};

const ORDERS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

// A text with what a terminal or a browser would obey made visible.
D.visible = (text) => {
  const parts = [];
  let last = 0;
  for (const found of text.matchAll(ORDERS)) {
    parts.push(text.slice(last, found.index));
    const code = found[0].charCodeAt(0).toString(16).toUpperCase().padStart(4, "0");
    parts.push(D.el("span", { className: "order" }, "U+" + code));
    last = found.index + 1;
  }
  parts.push(text.slice(last));
  return parts;
};

D.css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
D.colour = (index) => D.css("--c" + (index % 8));

D.number = (value) => {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e12) return value.toExponential(2);
  if (size >= 1e9) return +(value / 1e9).toPrecision(4) + " G";
  if (size >= 1e6) return +(value / 1e6).toPrecision(4) + " M";
  if (size >= 1e4) return Math.round(value).toLocaleString("en");
  if (size < 1e-3) return value.toExponential(1);
  return String(+value.toPrecision(4));
};

D.span = (seconds) => {
  if (seconds < 0.9995) return Math.round(seconds * 1000) + " ms";
  if (seconds < 90) return +seconds.toPrecision(3) + " s";
  if (seconds < 5400) return +(seconds / 60).toPrecision(3) + " min";
  return seconds < 172800 ? +(seconds / 3600).toPrecision(3) + " h" : +(seconds / 86400).toPrecision(3) + " days";
};

D.time = (ms) => {
  const at = new Date(ms);
  const pad = (number) => String(number).padStart(2, "0");
  return `${pad(at.getMonth() + 1)}-${pad(at.getDate())} ${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
};

D.get = async (what, query) => {
  if (D.exported) {
    const key = [what, query?.run, what === "sample" ? query.position : undefined].filter((part) => part !== undefined);
    const found = D.exported[key.join("/")];
    if (!found) throw new Error("this file does not have it; `driftless dashboard RUN` shows it");
    return found;
  }
  const token = sessionStorage.getItem("token");
  const headers = token ? { authorization: "Bearer " + token } : {};
  const given = Object.entries(query || {}).filter(([, value]) => value !== undefined && value !== "");
  const reply = await fetch("api/" + what + "?" + new URLSearchParams(given), { headers });
  if (reply.status === 401) {
    const words = token ? "This is not its token." : "This dashboard wants its token.";
    askForToken(words);
    throw new Error(words);
  }
  const answer = await reply.json();
  if (!reply.ok) throw new Error(answer.error?.message || reply.statusText);
  return answer;
};

// Figures of a run, with those that came since.
D.metrics = async (run) => {
  const had = D.tables[run] || { epoch: 0, rows: 0, columns: {} };
  const came = await D.get("metrics", { run, epoch: had.epoch, from: had.rows });
  const kept = came.epoch === had.epoch ? Math.min(came.from, had.rows) : 0;
  const columns = {};
  for (const [name, added] of Object.entries(came.columns)) {
    const before = kept ? (had.columns[name] || new Array(kept).fill(null)).slice(0, kept) : [];
    columns[name] = before.length ? before.concat(added) : added;
  }
  D.tables[run] = { epoch: came.epoch, rows: came.rows, stride: came.stride, columns };
  return came.rows !== had.rows || came.epoch !== had.epoch;
};

function askForToken(words) {
  const field = D.el("input", { id: "token", type: "password", autocomplete: "off", placeholder: "token" });
  const done = (event) => {
    event.preventDefault();
    sessionStorage.setItem("token", field.value.trim());
    shown = null;
    show();
  };
  document.getElementById("main").replaceChildren(
    D.el("form", { className: "ask", onsubmit: done }, D.el("p", null, words), field, D.el("button", null, "Open")),
  );
  field.focus();
}

// The address holds the view and what is chosen in it.
const TABS = [["run", "Run"], ["goodput", "Goodput"], ["samples", "Samples"], ["fleet", "Fleet"], ["time", "Time"], ["store", "Store"]];
D.state = () => {
  const [view, query] = location.hash.slice(1).split("?");
  const known = TABS.some(([name]) => name === view);
  return { view: known ? view : "run", query: Object.fromEntries(new URLSearchParams(query || "")) };
};
D.choose = (changes, view) => {
  const state = D.state();
  const query = { ...(view && view !== state.view ? { run: state.query.run } : state.query), ...changes };
  for (const name of Object.keys(query)) if (query[name] === "" || query[name] === undefined) delete query[name];
  const text = new URLSearchParams(query).toString();
  const hash = "#" + (view || state.view) + (text ? "?" + text : "");
  if (location.hash === hash) show();
  else location.hash = hash;
};
D.run = () => Math.min(Number(D.state().query.run) || 0, Math.max(D.runs.length - 1, 0));

// A choice of the run, where there are several.
D.runChoice = () => {
  if (D.runs.length < 2) return null;
  const options = D.runs.map((run, index) => D.el("option", { value: index, selected: index === D.run() }, run.name));
  return D.el("select", { "aria-label": "Run", onchange: (event) => D.choose({ run: event.target.value, step: "", position: "", from: "" }) }, options);
};

// A text with what one types, which stands between backticks or is a flag.
D.code = (text) => text.split(/(`[^`]*`|--[a-z][a-z0-9-]*)/).map((part, index) => (index % 2 ? D.el("code", null, part.replaceAll("`", "")) : part));
// Two parts beside each other, where there is room.
D.beside = (...parts) => D.el("div", { className: "beside" }, parts.map((part) => D.el("section", null, part)));
D.note = (text) => D.el("p", { className: "note" }, D.code(text));

let shown = null;
let busy = false;
let again = false;

async function show() {
  if (busy) {
    again = true;
    return;
  }
  busy = true;
  const state = D.state();
  const main = document.getElementById("main");
  try {
    D.runs = await D.get("runs");
    tell();
    const view = D.views[state.view];
    if (shown !== state.view) {
      for (const link of document.querySelectorAll("#tabs a")) {
        link.setAttribute("aria-current", link.dataset.view === state.view ? "page" : "false");
      }
      main.replaceChildren();
      main.className = state.view;
      shown = state.view;
      view.open(main);
    }
    await view.tick(main, state.query);
  } catch (error) {
    tell(error);
  }
  busy = false;
  if (again) {
    again = false;
    show();
  }
}

function tell(error) {
  const state = document.getElementById("state");
  const latest = Math.max(...D.runs.map((run) => run.updated_at_ms || 0));
  const damaged = D.runs.reduce((sum, { damaged: of }) => sum + of.metrics + of.events + of.ledger, 0);
  const words = [];
  if (error) words.push(error.message);
  else if (D.exported) words.push("a copy");
  else if (latest) words.push("last step " + D.span(Math.max(0, (Date.now() - latest) / 1000)) + " ago");
  for (const run of D.runs) if (run.unreadable) words.push(run.unreadable);
  if (damaged) words.push(damaged + (damaged === 1 ? " damaged line" : " damaged lines") + " left out");
  state.textContent = words.join(" · ");
  state.className = error || damaged ? "warn" : "";
  const alerts = D.runs.flatMap((run) => run.alerts.map((alert) => [run, alert]));
  const box = document.getElementById("alerts");
  const now = JSON.stringify(alerts.map(([run, alert]) => [run.name, alert]));
  if (box.dataset.shown !== now) {
    box.dataset.shown = now;
    box.replaceChildren(...alerts.map(([run, { at_ms, text, remedy }]) =>
      D.el("li", null, D.el("b", null, D.visible((D.runs.length > 1 ? run.name + ": " : "") + text)), ` since ${D.time(at_ms)}: `, D.code(remedy), ".")));
  }
  document.title = (alerts.length ? `(${alerts.length}) ` : "") + D.runs.map((run) => run.name).join(", ") + " – driftless";
}

addEventListener("DOMContentLoaded", () => {
  const data = document.getElementById("data");
  if (data) D.exported = JSON.parse(data.textContent);
  const link = ([view, title], index) =>
    D.el("a", { href: "#" + view, "data-view": view, title: "key " + (index + 1), onclick: (event) => {
      event.preventDefault();
      D.choose({}, view);
    } }, title);
  document.getElementById("tabs").append(...TABS.map(link));
  addEventListener("hashchange", show);
  addEventListener("keydown", (event) => {
    if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    const tab = TABS[Number(event.key) - 1];
    if (tab) D.choose({}, tab[0]);
    else D.views[shown]?.key?.(event);
  });
  // Colours of charts are those of the scheme.
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    shown = null;
    show();
  });
  show();
  if (!D.exported) setInterval(() => document.hidden || document.getElementById("token") || show(), 1500);
});
