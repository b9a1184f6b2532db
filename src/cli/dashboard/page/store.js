"use strict";
// What the store of a run holds: versions, leases, and what `gc` would remove.
{
  const bytes = (count) => D.number(count).replace(/(\d)$/, "$1 ") + "B";
  const figure = (text) => D.el("td", { className: "figure" }, text);
  const head = (...names) => D.el("tr", null, names.map(([name, isText]) => D.el("th", { className: isText ? "" : "figure" }, name)));
  const wide = (...rows) => D.el("div", { className: "wide" }, D.el("table", { className: "narrow" }, rows));
  const kindOf = ({ kind, anchor }) => (anchor && kind === "delta" ? "delta, anchor" : kind);

  function chain({ newest, versions, gc }, now) {
    if (!newest.length) return D.note("No version yet.");
    const row = (held) => {
      const isGone = gc && held.version < gc.floor;
      const isStored = !["reference", "collected"].includes(held.kind);
      return D.el("tr", { className: isGone ? "gone" : "", title: isGone ? "gc would remove it" : "" }, figure(held.version), D.el("td", null, kindOf(held)), figure(held.base ?? "–"), figure(held.kind === "collected" ? "–" : held.trainer_step),
        figure(isStored ? bytes(held.bytes) : "–"), figure(isStored ? (held.full_bytes / Math.max(held.bytes, 1)).toFixed(1) + "×" : "–"), figure(held.density === null ? "–" : (100 * held.density).toPrecision(3) + " %"),
        figure(held.created_ms ? D.span(Math.max(0, (now - held.created_ms) / 1000)) : "–"));
    };
    const names = [["version"], ["kind", true], ["base"], ["step"], ["size"], ["full/size"], ["changed"], ["age"]];
    const more = versions > newest.length ? D.note(`${D.number(versions - newest.length)} older versions: \`driftless inspect\` lists all.`) : null;
    return [wide(head(...names), newest.map(row)), more].filter(Boolean);
  }

  function leases(all) {
    if (!all.length) return D.note("No follower has a lease.");
    const row = (lease) => D.el("tr", null, D.el("td", null, D.visible(lease.follower)), figure(lease.version ?? "–"), figure(lease.needs), figure(lease.age_seconds === null ? "unknown" : D.span(lease.age_seconds) + " ago"),
      D.el("td", { className: lease.live ? "" : "odd" }, lease.live ? "live" : "ran out"));
    return wide(head(["follower", true], ["has"], ["needs, and what follows"], ["renewed"], ["lease", true]), all.map(row));
  }

  function collected({ gc, gc_fails: fails }) {
    if (fails) return D.note(`It cannot be said what gc would remove: ${fails}`);
    if (!gc) return D.note("Nothing.");
    const kept = gc.kept.map(({ from, why }, index) => D.el("tr", null, figure(from), D.el("td", null, D.visible(why), index || from !== gc.floor ? "" : D.el("b", null, " – this one decides"))));
    const total = gc.places ? `gc would remove ${D.number(gc.objects)} objects with ${bytes(gc.bytes)}, of ${D.number(gc.places)} versions.` : "gc would remove nothing.";
    const row = (removed) => D.el("tr", null, figure(removed.version), D.el("td", null, removed.collected ? "the version" : "what failed attempts left"), figure(removed.objects), figure(bytes(removed.bytes)));
    return [D.el("p", null, total), wide(head(["kept from version"], ["why", true]), kept),
      gc.places ? D.el("details", { className: "flags" }, D.el("summary", null, "what would go"), wide(head(["version"], ["what", true], ["objects"], ["size"]), gc.removed.map(row)), gc.places > gc.removed.length ? D.note(`and ${D.number(gc.places - gc.removed.length)} more`) : "") : ""];
  }

  D.views.store = {
    open(main) {
      this.drawn = "";
      this.body = D.el("div");
      this.choice = D.el("div", { className: "controls" });
      main.append(this.choice, this.body);
    },
    async tick() {
      const run = D.run();
      this.choice.replaceChildren(...[D.runChoice()].filter(Boolean));
      if (D.exported) return this.body.replaceChildren(D.note("A copy has nothing of the store. `driftless dashboard RUN` asks it."));
      const told = await D.get("store", { run });
      const now = JSON.stringify([run, told]);
      if (now === this.drawn) return;
      this.drawn = now;
      const { store, unreachable, found } = told;
      if (!store) return this.body.replaceChildren(D.note("The run's directory names no store: `driftless dashboard RUN --store URL` does."));
      const title = D.el("p", { className: "head" }, D.el("b", null, told.run), D.el("span", null, D.visible(store)), found?.model ? D.el("span", null, "model " + found.model) : null, found ? D.el("span", null, "as of " + D.time(found.at_ms)) : null);
      const trouble = unreachable ? D.el("p", { className: "odd" }, D.visible(unreachable)) : null;
      const parts = found ? [D.beside([D.el("h2", null, "Versions"), chain(found, found.at_ms)], [D.el("h2", null, "Leases"), leases(found.leases), D.el("h2", null, "Collection"), collected(found)])] : [unreachable ? null : D.note("The store is asked.")];
      this.body.replaceChildren(...[title, trouble, ...parts].flat().filter(Boolean));
    },
  };
}
