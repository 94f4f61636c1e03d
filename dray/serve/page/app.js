// The page: which view is shown, the keys, and what all views share.

import { onTrouble, stopAll } from "./api.js";
import { showCompare, showPicked } from "./compare.js";
import { showHelp } from "./dialogs.js";
import { h, put } from "./dom.js";
import { showExperiment } from "./experiment.js";
import { showList } from "./list.js";
import { showTrial } from "./trial.js";

const main = document.getElementById("main");

function view() {
  const [path, query = ""] = location.hash.replace(/^#/, "").split("?");
  const parts = path.split("/").filter(Boolean);
  let name = "";
  try {
    name = decodeURIComponent(parts[1] ?? "");
  } catch { /* an address that was typed */ }
  if (parts[0] === "e" && parts[2] === "t" && /^\d+$/.test(parts[3] ?? "")) return place => showTrial(place, name, Number(parts[3]));
  if (parts[0] === "e" && name) return place => showExperiment(place, name);
  if (parts[0] === "compare") return place => showCompare(place, new URLSearchParams(query));
  return showList;
}

function show() {
  if (location.hash === "#main") return;
  stopAll();
  for (const open of document.querySelectorAll("dialog[open]")) open.close();
  put(document.getElementById("trouble"), "");
  const place = h("div");
  main.replaceChildren(place);
  scrollTo(0, 0);
  view()(place);
  showPicked();
}

onTrouble(error => {
  const place = document.getElementById("trouble");
  if (!error) return put(place, "");
  put(place, error.status === 401 ? "Not signed in: open the address that dray serve has printed."
    : error.status ? error.message : "The server does not answer; trying again.");
  if (error.status === 404 && !main.querySelector("h1")) main.replaceChildren(h("h1", {}, "Not found"), h("p", {}, error.message));
});

// ------------------------------------------------------------------ keys
function move(step) {
  const links = [...main.querySelectorAll("tbody a.row, tbody .row a")].filter(link => link.offsetParent);
  if (!links.length) return;
  const place = links.indexOf(document.activeElement);
  const next = links[place < 0 ? (step > 0 ? 0 : links.length - 1) : Math.min(Math.max(place + step, 0), links.length - 1)];
  next.focus();
  next.scrollIntoView({ block: "nearest" });
}

function up() {
  const parts = location.hash.split("/");
  if (parts[1] === "e" && parts[3] === "t") location.hash = parts.slice(0, 3).join("/");
  else if (location.hash.length > 2) location.hash = "#/";
}

addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName) && event.target.type !== "checkbox";
  if (typing) {
    if (event.key === "Escape" && event.target.type === "search") {
      if (event.target.value) {
        event.target.value = "";
        event.target.dispatchEvent(new Event("input"));
      }
      event.target.blur();
      event.preventDefault();
    }
    return;
  }
  const keys = {
    "/": () => main.querySelector("input[type=search]")?.focus(),
    j: () => move(1),
    k: () => move(-1),
    x: () => document.activeElement?.closest("tr")?.querySelector("input[type=checkbox]")?.click(),
    c: () => document.querySelector("#picked a")?.click(),
    Escape: up,
    "?": showHelp,
  };
  if (keys[event.key]) {
    event.preventDefault();
    keys[event.key]();
  }
});

document.getElementById("help").addEventListener("click", showHelp);
addEventListener("hashchange", show);
show();
