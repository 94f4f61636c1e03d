// What is asked before something is done.

import { html, render, useLayoutEffect, useRef, useState } from "./lib/preact.js";
import { Refused } from "./data.js";
import { described } from "./keys.js";

export function say(text) {
  const place = document.getElementById("said");
  place.textContent = text;
  place.hidden = false;
  clearTimeout(say.timer);
  say.timer = setTimeout(() => { place.hidden = true; }, 6000);
}

// A dialog with a form. `act` gets the form's FormData when it is confirmed, and a function that shows how far it is; if it
// is refused, the dialog stays and says why. If `act` returns something to show, that takes the place of the form.
// `sure`: the focus is on the button that confirms.
export function ask(asked) {
  const place = document.body.appendChild(document.createElement("div"));
  render(html`<${Dialog} ...${asked} gone=${() => { render(null, place); place.remove(); }} />`, place);
}

function Dialog({ title, body, yes, danger = false, wide = false, sure = false, act, gone }) {
  const dialog = useRef(null), [error, setError] = useState(null), [busy, setBusy] = useState(false);
  const [progress, setProgress] = useState(""), [shown, setShown] = useState(null);
  useLayoutEffect(() => {
    dialog.current.showModal();  // with the picture that has it
    const leave = () => dialog.current?.close();  // Back leads to another view, which it is not about
    addEventListener("hashchange", leave);
    return () => removeEventListener("hashchange", leave);
  }, []);
  const confirm = async event => {
    if (!act || shown) return;
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      const found = await act(new FormData(event.target), setProgress);
      if (found) setShown(found);
      else dialog.current?.close();
    } catch (found) {
      if (!(found instanceof Refused)) console.error(found);
      setError(found);
      setBusy(false);
    }
  };
  return html`<dialog ref=${dialog} class=${wide ? "wide" : ""} aria-labelledby="asked" onclose=${gone}>
    <form method="dialog" onsubmit=${confirm}>
      <h2 id="asked">${title}</h2>${shown ?? body}<p class="quiet" role="status">${!shown && progress}</p>
      <div class="trouble" role="alert">${error && html`<p>${error.status ? error.message : "The server does not answer."}</p>
        <ul>${(error.faults ?? []).map(([field, fault]) => html`<li><b>${field}</b>: ${fault}</li>`)}</ul>`}</div>
      <div class="buttons">${act && !shown && html`<button type="button" onclick=${() => dialog.current.close()}>Cancel</button>`}
        <button type="submit" class=${danger && !shown ? "danger" : "primary"} autofocus=${sure} disabled=${busy && !shown}>${shown ? "Close" : yes}</button></div>
    </form></dialog>`;
}

export function showHelp() {
  ask({
    title: "Keyboard", yes: "Close",
    body: html`<dl>${described().map(([key, what]) => html`<dt><kbd>${key}</kbd></dt><dd>${what}</dd>`)}</dl>`,
  });
}
