// The keys: views say which they have while they are on the screen, and the help lists them.

import { useLayoutEffect, useRef } from "./lib/preact.js";

const layers = [];
// Keys that views have now, as [key, what it does].
export const described = () => [...new Map(layers.flat().map(([key, what]) => [key, what]))].filter(([, what]) => what).sort(([one], [other]) => kind(one) - kind(other) || (one < other ? -1 : 1));
const kind = key => key.length > 1 ? 3 : /[a-z]/i.test(key) ? 1 : /\d/.test(key) ? 0 : 2;  // figures, letters, signs, keys with names

// `keys`: lists of a key, what it does ("" leaves it out of the help), and its function; the last view's come first.
export function useKeys(keys) {
  const mine = useRef(keys);
  mine.current.splice(0, Infinity, ...keys);
  useLayoutEffect(() => {  // at once: what is seen has its keys
    layers.push(mine.current);
    return () => layers.splice(layers.indexOf(mine.current), 1);
  }, []);
}

const isText = it => /^(TEXTAREA|SELECT)$/.test(it.tagName) || it.isContentEditable
  || it.tagName === "INPUT" && !["checkbox", "radio", "range", "button"].includes(it.type);

function run(name, event) {
  const found = layers.flat().reverse().find(([key, , act]) => key === name && act(event) !== false);
  if (found) event.preventDefault();
  return Boolean(found);
}

addEventListener("keydown", event => {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || document.querySelector("dialog[open]")) return;
  if (isText(event.target)) {
    if (event.key === "Escape" && event.target.type === "search") {
      if (event.target.value) {
        event.target.value = "";
        event.target.dispatchEvent(new Event("input", { bubbles: true }));
      }
      event.target.blur();
      event.preventDefault();
    } else if (event.key === "Enter" && event.target.type === "search" && !event.target.form) {  // to what was found: the next match, or the first row
      event.target.blur();
      run("n", event) || run("j", event);
    }
    return;
  }
  run(`${event.altKey ? "Alt+" : ""}${event.key}`, event);
});
