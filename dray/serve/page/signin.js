// What a visitor without a token sees, at the address that was asked for: that view is there again after the sign-in.

import { html, useEffect, useRef, useState } from "./lib/preact.js";
import { ROOT } from "./data.js";

export function SignIn({ done }) {
  const [error, setError] = useState(""), [busy, setBusy] = useState(false), box = useRef(null);
  useEffect(() => {
    document.title = "Sign in · dray";
    for (const open of document.querySelectorAll("dialog[open]")) open.close();
    box.current.focus();
  }, []);
  const signIn = async event => {
    event.preventDefault();
    setBusy(true);
    try {
      const response = await fetch(`${ROOT}login`, {
        method: "POST", headers: { "X-Dray": "1", "Content-Type": "application/json" }, body: JSON.stringify({ token: box.current.value.trim() }),
      });
      if (response.ok) return done();
      const body = await response.json().catch(() => ({}));
      setError(body.error ?? `The server answered ${response.status}.`);
      box.current.select();
    } catch {
      setError("The server does not answer.");
    }
    setBusy(false);
    return undefined;
  };
  return html`<form class="signin" onsubmit=${signIn}><h1>Sign in</h1>
    <p>This page is for holders of a token. ${location.hash.length > 2 && "You are then taken to the view that you asked for."}</p>
    <label>Token <input type="password" name="token" ref=${box} required autocomplete="current-password" aria-describedby="signin-why" /></label>
    <p class="trouble" role="alert" id="signin-why">${error}</p>
    <button type="submit" class="primary" disabled=${busy}>Sign in</button>
    <p class="quiet">On the server's machine, <code>dray serve --status</code> prints an address with the token. Others get one with <code>dray serve token create NAME</code>.</p></form>`;
}
