// The table of an experiment's trials: the server sorts, searches and cuts it into pages.

import { experiment, get } from "./api.js";
import { isPicked, pick } from "./compare.js";
import { address, badge, count, h, number, plural, put, rows, shown } from "./dom.js";

const ROWS = 50;

export function trialTable(name) {
  const state = { sort: "best_metric", descending: false, search: "", offset: 0 };
  let about = null, columns = [], template = null, found = 0, asked = 0;
  const search = h("input", {
    type: "search", placeholder: "Search: adam lr<0.01 state=running", "aria-label": "Search trials", title:
      "Words, or conditions on columns: lr<0.01, state=running, best<=0.3",
  });
  const told = h("p", { className: "quiet", role: "status" });
  const head = h("tr"), body = h("tbody");
  const back = h("button", { onclick: () => page(-1) }, "‹ Previous"), next = h("button", { onclick: () => page(1) }, "Next ›");
  const place = h("section", {}, h("div", { className: "top" }, h("h2", {}, "Trials"), search), told,
    h("div", { className: "wide" }, h("table", { className: "trials", "aria-label": "Trials" }, h("thead", {}, head), body)),
    h("div", { className: "pages" }, back, next));

  function headings() {
    const wanted = [["", ""], ["trial", "trial"], ["state", "state"], ["batches", "batches"], ["metric", "last"], ["best_metric", "best"],
      ...about.varying.map(each => [`hparams.${each}`, each])];
    if (JSON.stringify(wanted) === JSON.stringify(columns)) return;
    columns = wanted;
    body.replaceChildren();
    template = h("tr", { className: "row" }, h("td", {}, h("input", { type: "checkbox" })), h("td", { className: "number" }, h("a")),
      ...columns.slice(2).map(() => h("td")));
    head.replaceChildren(...columns.map(([field, label]) => h("th", { scope: "col" }, field ? h("button", {
      className: "sort", onclick: () => {
        state.descending = state.sort === field ? !state.descending : field === "best_metric" && !about.smaller_is_better;
        [state.sort, state.offset] = [field, 0];
        load();
      },
    }, label) : h("span", { className: "hidden" }, "compare"))));
  }

  function page(step) {
    state.offset = Math.max(0, state.offset + step * ROWS);
    load().then(() => place.scrollIntoView({ block: "start" }));
  }

  async function load(signal) {
    const mine = ++asked;
    const query = new URLSearchParams({ ...state, descending: state.descending ? "1" : "0", limit: ROWS });
    const answer = await get(`${experiment(name)}/trials?${query}`, signal);
    if (mine !== asked) return;  // another key was pressed
    found = answer.found;
    columns.forEach(([field], place) => head.children[place]?.setAttribute("aria-sort",
      field !== state.sort ? "none" : state.descending ? "descending" : "ascending"));
    const last = Math.min(state.offset + ROWS, found);
    put(told, found === 0 ? (answer.of ? `None of ${plural(answer.of, "trial")} is like that.` : "No trials yet.")
      : `${count(state.offset + 1)} to ${count(last)} of ${found === answer.of ? plural(found, "trial") : `${count(found)} found, ${plural(answer.of, "trial")} in all`}`);
    rows(body, answer.trials, it => it.trial, make, fill);
    back.disabled = state.offset === 0;
    next.disabled = last >= found;
    back.parentElement.hidden = found <= ROWS;
    place.dataset.drawn = JSON.stringify([state.search, state.sort, state.descending, state.offset]);
  }

  // Copies of one row: with 50 new ones at a key, making each cell by itself would be felt.
  const make = it => {
    const row = template.cloneNode(true), [box, link] = [row.querySelector("input"), row.querySelector("a")];
    box.setAttribute("aria-label", `compare trial ${it.trial}`);
    link.href = address(name, it.trial);
    link.textContent = it.trial;
    return row;
  };
  body.addEventListener("change", event => pick(name, Number(event.target.closest("tr").dataset.key), event.target.checked));

  function fill(row, it) {
    const cells = row.children;
    cells[0].firstChild.checked = isPicked(name, it.trial);
    row.classList.toggle("leader", it.trial === about.best_trial);
    if (cells[2].dataset.state !== it.state) {
      cells[2].dataset.state = it.state;
      cells[2].replaceChildren(badge(it.state));
    }
    const since = it.nan_since === null ? "" : ` NaN since ${count(it.nan_since)}`;
    put(cells[3], count(it.batches) + (it.restarts ? ` (${plural(it.restarts, "restart")})` : ""));
    put(cells[4], number(it.metric) + since);
    put(cells[5], number(it.best_metric));
    about.varying.forEach((each, place) => put(cells[6 + place], shown(it.hparams[each])));
  }

  search.addEventListener("input", () => {
    [state.search, state.offset] = [search.value, 0];
    load().catch(() => {});
  });
  place.update = (now, signal) => {
    if (!about) state.descending = !now.smaller_is_better;
    about = now;
    headings();
    return load(signal);
  };
  return place;
}
