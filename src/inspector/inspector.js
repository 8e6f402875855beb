"use strict";

// Brings what is marked as live up to date, by fetching the page that is open. Without this script a reload does it.
(() => {
  const EVERY = 5000;
  const live = document.querySelector("[data-live]");
  if (!live) return;
  const pulse = document.getElementById("pulse");
  // Not location.href: it could carry a name and a password, with which nothing may be fetched.
  const here = location.protocol + "//" + location.host + location.pathname + location.search;

  async function look() {
    try {
      const answer = await fetch(here, { cache: "no-store", credentials: "same-origin" });
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const fresh = page.querySelector("[data-live]");
      if (!answer.ok || !fresh) throw new Error(String(answer.status));
      if (fresh.innerHTML !== live.innerHTML) live.replaceChildren(...fresh.childNodes);
      pulse.textContent = "Live: looks every " + EVERY / 1000 + " s.";
      pulse.className = "";
    } catch (error) {
      pulse.textContent = "Not live: the last look failed (" + error.message + "). It goes on trying.";
      pulse.className = "bad";
    }
  }

  async function keepLooking() {
    if (!document.hidden) await look();
    setTimeout(keepLooking, EVERY);
  }

  pulse.textContent = "Live: looks every " + EVERY / 1000 + " s.";
  setTimeout(keepLooking, EVERY);
})();
