"""A page of another site, in a browser that is logged in to the server, can't stop an experiment or read anything."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.serve.conftest import TOKEN, Served, results, served

__all__ = ["results", "served"]

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PAGE = b"""<!doctype html><title>prizes</title>
<form id=form method=post target=hidden></form><iframe name=hidden></iframe>
"""
ATTACKS = """
const [stop, done] = arguments, found = {};
async function attempt(name, options) {
  try { const reply = await fetch(stop, {method: "POST", ...options}); found[name] = reply.type + " " + reply.status; }
  catch (error) { found[name] = "refused"; }
}
(async () => {
  await attempt("simple", {mode: "no-cors", credentials: "include"});
  await attempt("text", {mode: "no-cors", credentials: "include", headers: {"Content-Type": "text/plain"}, body: "{}"});
  await attempt("header", {credentials: "include", headers: {"X-Dray": "1"}});
  await attempt("beacon", {mode: "no-cors", credentials: "include", keepalive: true});
  try { found.read = await (await fetch(stop.replace(/experiments.*/, "status"), {credentials: "include"})).text(); }
  catch (error) { found.read = "refused"; }
  const form = document.getElementById("form");
  form.action = stop; form.submit();
  setTimeout(() => done(found), 1000);
})();
"""


class Prizes(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def foreign() -> Iterator[int]:
    """The port of another site. A thread for each connection: browsers open some ahead, and send nothing."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Prizes)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


# localhost: another port of the same host is the same site for cookies, which are then sent. 127.0.0.1: another site.
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_foreign_page_can_not_stop_an_experiment(browser: Any, served: Served, foreign: int, host: str) -> None:
    (served.results / "digits-1").mkdir()
    (served.results / "digits-1" / "experiment.yaml").write_text("name: digits\n")
    served.control.put("digits-1", "RUNNING")
    own = f"http://localhost:{served.port}"
    stop = f"{own}/api/v1/experiments/digits-1/stop"
    browser.get(f"{own}/login?token={TOKEN}")
    assert browser.current_url == f"{own}/"

    browser.get(f"http://{host}:{foreign}/")
    found = browser.execute_async_script(ATTACKS, stop)
    assert served.control.calls == [], found
    assert served.control.experiment("digits-1").state == "RUNNING"
    assert found == dict.fromkeys(["simple", "text", "header", "beacon", "read"], "refused")

    # The same browser, on the server's own page.
    browser.get(f"{own}/")
    own_page = """
    const [stop, done] = arguments;
    fetch(stop, {method: "POST", headers: {"X-Dray": "1"}}).then((reply) => done(reply.status));
    """
    assert browser.execute_async_script(own_page, stop) == 200
    assert served.control.calls == [("stop", "digits-1")]


def test_a_foreign_page_can_not_show_the_server_in_a_frame(browser: Any, served: Served, foreign: int) -> None:
    browser.get(f"http://localhost:{foreign}/")
    script = """
    const [own, done] = arguments, frame = document.createElement("iframe");
    frame.onload = () => { try { done(frame.contentDocument ? "read" : "none"); } catch (error) { done("none"); } };
    frame.src = own; document.body.append(frame);
    """
    assert browser.execute_async_script(script, f"http://localhost:{served.port}/") == "none"
    said = " ".join(entry["message"] for entry in browser.get_log("browser"))
    assert "frame-ancestors" in said
