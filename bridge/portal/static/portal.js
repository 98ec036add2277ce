// Updates the countdowns, and loads the changed parts of the page. Without this script, users must reload the page.
"use strict";
(() => {
  const main = document.querySelector("main");
  const follows = main.dataset.follows;
  const status = document.getElementById("live");
  const ahead = Date.parse(document.documentElement.dataset.now) - Date.now();
  const say = (text, state) => { status.textContent = text; status.dataset.state = state; };
  const GUARD_MS = 800, COMPLAINT_MS = 5000, PRESS_MS = 10000, AGAIN_MS = 3000;
  let movedAt = -GUARD_MS, source = null, waiting = new Set(), fetching = false, complaint = null;
  let pressed = false, released = () => {}, isBehind = false;
  const sayLive = () => { if (source?.readyState === EventSource.OPEN && !isBehind) say("live", "live"); };
  const served = new WeakMap();

  const span = (seconds) => {
    const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].map(([size, unit]) => {
      const count = Math.floor(seconds / size);
      seconds -= count * size;
      return [count, unit];
    });
    const first = parts.findIndex(([count]) => count > 0);
    return first < 0 ? "now" : "in " + parts.slice(first, first + 2).map((part) => part.join(" ")).join(" ");
  };
  const count = () => document.querySelectorAll("time.countdown").forEach((time) => {
    time.textContent = span(Math.max(0, Math.ceil((Date.parse(time.dateTime) - Date.now() - ahead) / 1000)));
  });

  // Copies the input, the opened details, and the focus from `old` to `fresh`, but not the selection of a changed event.
  const keep = (old, fresh) => {
    const inputs = [...fresh.querySelectorAll("input:not([type=hidden])")];
    old.querySelectorAll("input:not([type=hidden])").forEach((input) => {
      const other = inputs.find((each) => each.name === input.name && each.type === input.type);
      if (!other) return;
      if (input.type === "checkbox") other.checked = input.checked && old.dataset.digest === fresh.dataset.digest;
      else other.value = input.value;
    });
    old.querySelectorAll("details[open]").forEach((each) => fresh.querySelector("#" + each.id)?.setAttribute("open", ""));
    const had = document.activeElement;
    const places = "a,button,input,summary,[tabindex]";
    const place = old.contains(had) ? [...old.querySelectorAll(places)].indexOf(had) : -1;
    return () => { if (place >= 0) fresh.querySelectorAll(places)[place]?.focus({ preventScroll: true }); };
  };
  const put = (fresh, old, before, list) => {
    const text = fresh.outerHTML; // the text as served, because the countdown changes the page
    if (old && served.get(old) === text) return;
    served.set(fresh, text);
    const focus = old ? keep(old, fresh) : () => {};
    if (!old || old.parentElement !== list || old.dataset.digest !== fresh.dataset.digest) movedAt = performance.now();
    if (old && old.parentElement === list && before === undefined) old.replaceWith(fresh);
    else { old?.remove(); list.insertBefore(fresh, before ?? null); }
    focus();
  };
  const merge = (part, keys) => {
    part.querySelectorAll("[data-part]").forEach((fresh) => {
      const old = document.getElementById(fresh.id);
      if (old) put(document.adoptNode(fresh), old, undefined, old.parentElement);
    });
    const rows = new Map([...part.querySelectorAll("[data-list] > *")].map((row) => [row.id, row]));
    document.querySelectorAll("[data-list] > *").forEach((row) => {
      const isMeant = keys === null || keys.has(row.id.replace("event-", ""));
      if (isMeant && !rows.has(row.id)) { row.remove(); movedAt = performance.now(); }
    });
    rows.forEach((row, id) => {
      const list = document.querySelector(`[data-list="${row.parentElement.dataset.list}"]`);
      const old = document.getElementById(id);
      const isInPlace = old && old.parentElement === list && old.dataset.order === row.dataset.order;
      const before = isInPlace ? undefined
        : [...list.children].find((each) => each !== old && each.dataset.order > row.dataset.order) ?? null;
      put(document.adoptNode(row), old, before, list);
    });
    count();
  };
  // Repeats a failed request, because the stream reports each change only once.
  const update = async () => {
    if (fetching) return;
    fetching = true;
    while (waiting.size) {
      const asked = waiting, keys = asked.has("all") ? null : asked;
      waiting = new Set();
      const address = new URL(location.href);
      address.searchParams.set("part", keys && follows === "events" ? [...keys].join(",") : "");
      const answer = await fetch(address).catch(() => null);
      const text = answer?.ok ? await answer.text().catch(() => null) : null;
      // The browser sends no click for a button that is replaced while the pointer presses it.
      if (pressed) await new Promise((done) => { released = done; setTimeout(done, PRESS_MS); });
      if (text !== null) {
        merge(new DOMParser().parseFromString(text, "text/html"), keys);
        if (isBehind) { isBehind = false; sayLive(); }
      } else if (answer?.status === 401) location.reload();
      else if (!answer || answer.ok || answer.status >= 500) {
        isBehind = true;
        say("out of date: retrying", "away");
        asked.forEach((key) => waiting.add(key));
        await new Promise((done) => setTimeout(done, AGAIN_MS));
      }
    }
    fetching = false;
  };
  const concerns = (key) => ["*", key].includes(follows) || key === "all"
    || (follows === "events" && /^[0-9a-f]{32}$/.test(key));
  const changed = (keys) => {
    keys.filter(concerns).forEach((key) => waiting.add(key));
    update();
  };

  // The stream is open only while the page is visible, because all tabs share six connections to a host.
  const listen = () => {
    source?.close();
    source = null;
    if (document.hidden) return;
    source = new EventSource("/live");
    source.addEventListener("open", sayLive);
    source.addEventListener("changed", (event) => changed(event.data.split(" ")));
    source.addEventListener("ended", () => { source.close(); location.reload(); });
    source.addEventListener("error", () => {
      say("not live: reconnecting", "away");
      if (source?.readyState === EventSource.CLOSED) setTimeout(() => { changed(["all"]); listen(); }, 5000);
    });
  };
  // Reports for some seconds, or until the next successful click, that a click had no effect.
  const complain = (text) => {
    say(text, "away");
    clearTimeout(complaint);
    complaint = setTimeout(sayLive, COMPLAINT_MS);
  };
  // Forms are sent in the background, and the page then shows the result in place. If the portal refuses a form, the
  // script submits it again as a normal form, because the response is a page that gives the reason.
  const again = (action, fields) => {
    const form = document.createElement("form");
    Object.assign(form, { method: "post", action, hidden: true });
    fields.forEach((value, name) => form.append(Object.assign(document.createElement("input"), { name, value })));
    document.body.append(form);
    form.submit();
  };
  document.addEventListener("submit", async (event) => {
    const form = event.target, button = event.submitter, part = form.closest("[data-part],[data-list] > *");
    if (!button || form.method !== "post" || !part) return;
    event.preventDefault();
    sayLive();
    const fields = new URLSearchParams(new FormData(form));
    if (button.name) fields.append(button.name, button.value);
    button.disabled = true;
    button.blur(); // otherwise, Enter could press a different button that takes its place
    const answer = await fetch(form.action, { method: "POST", body: fields, redirect: "manual" }).catch(() => null);
    button.disabled = false;
    if (!answer) complain("The portal did not receive it. Try again.");
    else if (answer.type !== "opaqueredirect") again(form.action, fields);
    else {
      document.getElementById(part.id)?.querySelectorAll("form").forEach((each) => each.reset());
      changed(["all"]);
    }
  });
  const release = () => setTimeout(() => { pressed = false; released(); }); // after the click event
  document.addEventListener("pointerdown", (event) => { pressed = event.button === 0; });
  ["pointerup", "pointercancel"].forEach((name) => document.addEventListener(name, release));
  document.addEventListener("click", (event) => {
    if (performance.now() - movedAt > GUARD_MS || !event.target.closest?.("main form button")) return;
    event.preventDefault();
    complain("The page has just changed. Check it again.");
  }, true);
  count();
  setInterval(count, 1000);
  if (follows && follows !== "none") {
    document.addEventListener("visibilitychange", listen);
    listen();
  }
})();
