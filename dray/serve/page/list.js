// All experiments.

import { Poll, get, news } from "./api.js";
import { address, ago, badge, clock, count, duration, h, number, plural, put, rows } from "./dom.js";

const EVERY_MS = 2500, MOST = 300;
const COLUMNS = [
  ["#", it => it.number, "number"], ["experiment", it => it.title.toLowerCase()], ["state", it => it.state],
  ["progress", it => share(it)], ["best", it => it.best_metric, "number"], ["slots", it => it.submitted?.slots ?? -1],
  ["tags", it => it.submitted?.tags.join() ?? ""], ["started", it => it.began ?? it.submitted?.submitted ?? 0],
];
const remembered = { search: "", sort: 7, descending: true };
// Without a number of trials, the budget is what ends the search.
const share = it => it.max_trials === null && it.budget ? Math.max(...Object.values(it.budget).map(of => of.spent / of.total))
  : it.ended / Math.max(it.total, 1);

export function showList(place) {
  document.title = "dray";
  let all = [], status = null, unread = 0, most = MOST;
  const search = h("input", { type: "search", placeholder: "Search: name, state, tag", "aria-label": "Search experiments", value: remembered.search });
  const found = h("p", { className: "quiet", role: "status" });
  const head = h("tr"), body = h("tbody"), more = h("button", { hidden: true, onclick: () => { most += MOST; fill(); } }, "Show more");
  place.append(h("div", { className: "top" }, h("h1", {}, "Experiments"), search), found,
    h("div", { className: "wide" }, h("table", { className: "list", "aria-label": "Experiments" }, h("thead", {}, head), body)), more);

  COLUMNS.forEach(([name], place) => head.append(h("th", { scope: "col" }, h("button", {
    className: "sort",
    onclick: () => {
      remembered.descending = remembered.sort === place ? !remembered.descending : name === "started" || name === "slots";
      remembered.sort = place;
      fill();
    },
  }, name))));

  function chosen() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const texts = it => `${it.number ?? ""} ${it.name} ${it.title} ${it.state} ${it.metric ?? ""} ${it.submitted?.tags.join(" ") ?? ""} ${it.submitted?.owner ?? ""}`.toLowerCase();
    const kept = all.filter(it => words.every(word => texts(it).includes(word)));
    const value = COLUMNS[remembered.sort][1], sign = remembered.descending ? -1 : 1;
    const missing = it => value(it) === null || value(it) === undefined;
    return kept.sort((one, other) => missing(one) - missing(other)
      || sign * (value(one) < value(other) ? -1 : value(one) > value(other) ? 1 : 0));
  }

  function fill() {
    remembered.search = search.value;
    const kept = chosen();
    [...head.children].forEach((cell, place) =>
      cell.setAttribute("aria-sort", place !== remembered.sort ? "none" : remembered.descending ? "descending" : "ascending"));
    put(found, all.length === 0 ? (unread ? "Reading …" : "No experiments yet: dray experiment create CONFIG MODEL_DIR") :
      `${kept.length === all.length ? plural(all.length, "experiment") : `${count(kept.length)} of ${plural(all.length, "experiment")}`}`
      + (unread ? `, ${count(unread)} still to be read` : ""));
    rows(body, kept.slice(0, most), it => it.name, make, row);
    more.hidden = kept.length <= most;
  }

  const make = () => h("tr", { className: "row" }, h("td", { className: "number" }), h("td", {}, h("a", {}), h("div", { className: "quiet name" })),
    h("td"), h("td", {}, h("progress", { max: 1 }), h("span", { className: "quiet" })), h("td"),
    h("td", {}, h("progress", { className: "slots", max: 1 }), h("span", { className: "quiet" })), h("td"), h("td", { className: "quiet" }));

  function row(line, it) {
    const [id, name, state, progress, best, slots, tags, started] = line.children;
    put(id, it.number === null ? "" : String(it.number));
    const [link, directory] = name.children;
    if (it.is_local) link.removeAttribute("href");  // it has no page
    else if (link.getAttribute("href") !== address(it.name)) link.href = address(it.name);
    put(link, it.title);
    put(directory, it.is_local ? "local run" : it.title === it.name ? "" : it.name);
    if (state.dataset.state !== it.state) {
      state.dataset.state = it.state;
      state.replaceChildren(badge(it.state));
    }
    state.title = it.why ?? it.reason ?? "";
    progress.firstChild.value = share(it);
    progress.firstChild.setAttribute("aria-label", `${it.ended} of ${it.total} trials ended`);
    put(progress.lastChild, `${count(it.ended)} / ${count(it.total)}${it.failed ? `, ${count(it.failed)} failed` : ""}`);
    put(best, it.best_metric === null ? "–" : `${number(it.best_metric)} ${it.metric}`);
    best.className = "best";
    const has = it.submitted?.slots ?? 0, waits = it.submitted?.waiting ?? 0;
    slots.firstChild.hidden = !has;
    slots.firstChild.value = has / Math.max(status?.slots ?? 1, has, 1);
    slots.firstChild.setAttribute("aria-label", `${number(has)} of ${number(status?.slots ?? 0)} slots`);
    put(slots.lastChild, has || waits ? `${number(has)} of ${number(status?.slots ?? 0)}${waits ? `, ${plural(waits, "trial")} waiting` : ""}` : "");
    const by = it.submitted?.owner, wanted = [...(it.submitted?.tags ?? []), by].join("\n");
    if (tags.dataset.tags !== wanted) {
      tags.dataset.tags = wanted;
      tags.replaceChildren(...(it.submitted?.tags ?? []).map(tag => h("span", { className: "tag" }, tag)), by ? h("span", { className: "quiet" }, ` by ${by}`) : "");
    }
    const at = it.began ?? it.submitted?.submitted;
    put(started, ago(at)).title = clock(at);
  }

  search.addEventListener("input", () => { most = MOST; fill(); });
  new Poll(async signal => {
    const answer = await news("/experiments", signal) ?? (all.length ? null : await get("/experiments", signal));
    if (!answer) return;
    [all, status, unread] = [answer.experiments, answer.status, answer.unread];
    showStatus(status);
    fill();
  }, EVERY_MS);
}

export function showStatus(status) {
  const busy = `${number(status.busy)} of ${number(status.slots)} slots busy`;
  put(document.getElementById("server"), status.slots ? busy : status.cluster).title =
    `dray ${status.version} on ${status.cluster}, up for ${duration(Date.now() / 1000 - status.since)}; results in ${status.results}`;
}

