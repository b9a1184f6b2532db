"use strict";
// Watches a run as a stranger would, while it goes on: node watch.js HOME URL TOKEN STEP FILES.
// It says `watching` once it waits for the run's first step. An engine is killed once STEP steps are complete.
const { withPage, until, run } = require("./browser.js");
const [home, url, token, step, files] = process.argv.slice(2);

// The page asks for its token, again where it gets another one, and opens with it.
async function open(page) {
  await page.goto(url);
  for (const [given, asked] of [["another", "wants its token"], [token, "not its token"]]) {
    await until(page, `a page that says \`${asked}\``, (words) => document.getElementById("main").innerText.includes(words), asked);
    await page.$eval("#token", (field) => (field.value = ""));
    await page.type("#token", given);
    await page.keyboard.press("Enter");
  }
  await page.waitForSelector("#main .head");
}

const stepsShown = () => Number(document.querySelector("#main .head")?.innerText.match(/(\d+) of \d+|(\d+) steps/)?.slice(1).find(Boolean) ?? NaN);

// The steps at which the page says that an engine was lost; null before it says so.
const lostSteps = () => {
  const lines = [...document.querySelectorAll(".facts .odd")].map(({ innerText }) => innerText).filter((text) => text.includes("lost"));
  const steps = lines.map((text) => text.match(/step (\d+)/)).filter(Boolean).map(([, step]) => Number(step));
  return steps.length ? steps : null;
};

// Of each view, in the order of the keys, something that changes while a run goes on.
const VIEWS = {
  run: () => document.querySelector("#main .head")?.innerText,
  goodput: () => document.querySelector("#main table") && document.querySelector("#main").innerText,
  samples: () => document.querySelector("#main tr[data-position]") && document.querySelector("#main .note").innerText,
  fleet: () => document.querySelector("#main table.narrow tr:nth-child(2) td")?.innerText,
  time: () => document.querySelector("#main canvas.timeline") && document.querySelector("#main").innerText,
  store: () => document.querySelector("#main table.narrow tr:nth-child(2) td")?.innerText,
};

// What each view shows, once that is something else than `before`. The store's is asked for again after 15 s.
async function seen(page, before) {
  const found = {};
  for (const [index, [name, told]] of Object.entries(VIEWS).entries()) {
    await page.keyboard.press(String(index + 1));
    await until(page, `the view ${name}`, (wanted) => document.getElementById("main").className === wanted, name);
    const what = before ? `${name} with something else than ${JSON.stringify(before[name])}` : `content of ${name}`;
    found[name] = await until(page, what, `(() => { const told = (${told})(); return told && told !== ${JSON.stringify(before?.[name] ?? "")} ? told : false; })()`);
  }
  await page.keyboard.press("1");
  return found;
}

// How long the newest step had been complete when the page showed it, in milliseconds, of the first one behind `step`.
const lateness = (step) => `(() => ((${stepsShown})() > ${step} ? [(${stepsShown})(), Date.now() - D.runs[0].updated_at_ms] : false))()`;

run(async () => {
  await withPage(home, files, async (page, wrong) => {
    await page.setViewport({ width: 1200, height: 800 });
    await open(page);
    // The browser tells of the two answers 401 that were wanted.
    const refused = wrong.splice(0).filter((text) => !text.includes("401"));
    wrong.push(...refused);
    console.log("watching");
    await page.evaluate(() => (window.isSamePage = true));
    const first = await until(page, "a first step", `(${stepsShown})() || false`);
    const [next, late1] = await until(page, `a step behind ${first}, by itself`, lateness(first));
    const [, late2] = await until(page, `a step behind ${next}, by itself`, lateness(next));
    await until(page, "charts", () => Boolean(document.querySelector("#main canvas")));
    const early = await seen(page);
    // The engine that is lost, or groups of one reward, as the policy of a few steps has them. What to do names a flag or a command.
    await until(page, "an alert with what to do", () => Boolean(document.querySelector("#alerts li code")) && document.title.startsWith("("));
    await page.keyboard.press("4");
    const lost = await until(page, "the step at which an engine was lost", lostSteps);
    // Steps are counted from 0 there. A quick step ends before the kill, or before it is noticed.
    const late = Math.min(...lost) - Number(step);
    if (!(late >= 0 && late <= 2)) throw new Error(`expected an engine that was lost at step ${step}, or two later, found ${lost}`);
    await page.screenshot({ path: `${files}/killed.webp`, type: "webp", quality: 80 });
    await seen(page, early);
    console.log(`steps were on the page ${late1} and ${late2} ms behind their completion`);
    if (!(await page.evaluate(() => window.isSamePage))) throw new Error("expected a page that changes by itself, found one that was loaded again");
  });
  console.log("a step more, each view with something new, an alert with what to do, and the step of the engine that was killed");
});
