"use strict";

// Brings what is marked as live up to date, by fetching the page that is open. Without this script a reload does it.
(() => {
  const EVERY = 5000;
  const live = document.querySelector("[data-live]");
  if (!live) return;
  const pulse = document.getElementById("pulse");
  // Not location.href: it could carry a name and a password, with which nothing may be fetched.
  const here = location.protocol + "//" + location.host + location.pathname + location.search;

  function say(what, isBad) {
    pulse.textContent = what;
    pulse.className = isBad ? "bad" : "";
  }

  // What somebody selects, or has come to by keyboard, is not taken away.
  function isInUse() {
    const selection = document.getSelection();
    return live.contains(document.activeElement) || (!selection.isCollapsed && selection.containsNode(live, true));
  }

  async function look() {
    if (isInUse()) return say("Stands still while something of it is selected.");
    try {
      const answer = await fetch(here, { cache: "no-store", credentials: "same-origin" });
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const fresh = page.querySelector("[data-live]");
      if (!answer.ok || !fresh) throw new Error(String(answer.status));
      if (!isInUse()) live.replaceChildren(...fresh.childNodes);
      say("Live: looks every " + EVERY / 1000 + " s.");
    } catch (error) {
      say("Not live: the last look failed (" + error.message + "). It goes on trying.", true);
    }
  }

  async function keepLooking() {
    if (!document.hidden) await look();
    setTimeout(keepLooking, EVERY);
  }

  say("Live: looks every " + EVERY / 1000 + " s.");
  setTimeout(keepLooking, EVERY);
})();
