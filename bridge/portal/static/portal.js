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
    if (seconds <= 0) return "now";
    const minutes = Math.floor(seconds / 60), two = (number) => String(number).padStart(2, "0");
    return seconds < 3600 ? `${minutes}m ${two(seconds % 60)}s` : `${Math.floor(minutes / 60)}h ${two(minutes % 60)}m`;
  };
  const count = () => document.querySelectorAll("time.countdown").forEach((time) => {
    const left = Math.max(0, Math.ceil((Date.parse(time.dateTime) - Date.now() - ahead) / 1000));
    time.textContent = span(left);
    time.classList.toggle("is-urgent", left < 300);
    time.classList.toggle("is-soon", left >= 300 && left < 600);
  });
  // Shows the local time after each UTC time. The style sheet prints the attribute.
  const localize = () => document.querySelectorAll("time:not(.countdown):not([data-local])").forEach((time) => {
    const at = new Date(time.dateTime), parts = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
    if (at.getTimezoneOffset()) time.dataset.local = at.toLocaleTimeString([], parts);
  });
  const boxes = () => [...document.querySelectorAll("input[form=many]:checked")];
  const tally = () => document.querySelectorAll("[data-chosen]").forEach((each) => {
    const number = boxes().length;
    each.textContent = number ? " " + number : "";
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
  // The text as served, because the script changes times. The CSRF token is different in each response.
  const textOf = (part) => part.outerHTML.replace(/name="csrf" value="[^"]*"/g, "");
  const put = (fresh, old, before, list) => {
    const text = textOf(fresh), isSame = old && served.get(old) === text;
    if (isSame && before === undefined) return;
    served.set(fresh, text);
    const focus = old ? keep(old, fresh) : () => {};
    if (old && old.dataset.digest !== fresh.dataset.digest) movedAt = performance.now();
    if (old && before === undefined) old.replaceWith(fresh);
    else { old?.remove(); list.insertBefore(fresh, before ?? null); }
    focus();
  };
  const merge = (part) => {
    part.querySelectorAll("[data-part]").forEach((fresh) => {
      const old = document.getElementById(fresh.id);
      if (old) put(document.adoptNode(fresh), old, undefined, old.parentElement);
    });
    part.querySelectorAll("[data-list]").forEach((fresh) => {
      const list = document.querySelector(`[data-list="${fresh.dataset.list}"]`);
      const rows = [...fresh.children], ids = new Set(rows.map((row) => row.id));
      [...list.children].filter((row) => !ids.has(row.id)).forEach((row) => row.remove());
      rows.forEach((row, place) => {
        const old = [...list.children].find((each) => each.id === row.id);
        const there = list.children[place];
        put(document.adoptNode(row), old, old && old === there ? undefined : there, list);
      });
    });
    count();
    localize();
    tally();
  };
  // Repeats a failed request, because the stream reports each change only once.
  const update = async () => {
    if (fetching) return;
    fetching = true;
    while (waiting.size) {
      const asked = waiting;
      waiting = new Set();
      const address = new URL(location.href);
      address.searchParams.set("part", "");
      const answer = await fetch(address).catch(() => null);
      const text = answer?.ok ? await answer.text().catch(() => null) : null;
      // The browser sends no click for a button that is replaced while the pointer presses it.
      if (pressed) await new Promise((done) => { released = done; setTimeout(done, PRESS_MS); });
      if (text !== null) {
        merge(new DOMParser().parseFromString(text, "text/html"));
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
    if (performance.now() - movedAt > GUARD_MS || !event.target.closest?.("main form[method=post] button")) return;
    event.preventDefault();
    complain("The page has just changed. Check it again.");
  }, true);
  // Keyboard shortcuts. The help on each page lists them.
  const focusNext = (step) => {
    const links = [...document.querySelectorAll("main tbody th a")];
    const place = links.findIndex((each) => each.closest("tr").contains(document.activeElement));
    links[Math.min(Math.max(place + step, 0), links.length - 1)]?.focus();
  };
  const decide = (verdict) => {
    const button = document.querySelector(`main button[value=${verdict}]`);
    const box = document.activeElement.closest("tr")?.querySelector("input[form=many]");
    if (!document.getElementById("many")) button?.focus();
    else if (boxes().length || box) {
      if (!boxes().length) box.checked = true;
      button.click();
    }
  };
  const KEYS = {
    j: () => focusNext(1),
    k: () => focusNext(-1),
    x: () => document.activeElement.closest("tr")?.querySelector("input[form=many]")?.click(),
    a: () => decide("approve"),
    h: () => decide("hold"),
    "/": () => document.querySelector("main input[type=search]")?.focus(),
    "?": () => { location.hash = location.hash === "#help" ? "#main" : "#help"; },
  };
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target.closest("input:not([type=checkbox]), select, textarea");
    if (isTyping || event.ctrlKey || event.altKey || event.metaKey || !KEYS[event.key]) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  document.addEventListener("change", tally);
  document.querySelectorAll("[data-part], [data-list] > *").forEach((each) => served.set(each, textOf(each)));
  count();
  localize();
  tally();
  setInterval(count, 1000);
  if (follows && follows !== "none") {
    document.addEventListener("visibilitychange", listen);
    listen();
  }
})();
