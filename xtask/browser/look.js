"use strict";
// Looks at each view of a dashboard as a reader would, and takes its picture: node look.js HOME URL PICTURES.
// HOME is where `unpack.js` has put a browser. It fails where a view is empty, or where the browser has something to complain of.
const [home, url, pictures] = process.argv.slice(2);
const puppeteer = require(`${home}/node_modules/puppeteer-core`);

// Of each view, what is there once it is drawn, and keys that are pressed then.
const VIEWS = {
  run: { drawn: "#main canvas", says: "reward" },
  goodput: { drawn: "#main table", says: "trained" },
  samples: { drawn: "#main tbody tr, #main table tr + tr", says: "reward" },
  fleet: { drawn: "#main table", says: "serving" },
  time: { drawn: "#main canvas.timeline", says: "steps", keys: ["j", "j", "+", "ArrowRight", "k", "0"], told: ".told" },
  store: { drawn: "#main table", says: "Versions" },
};
const SIZES = { wide: { width: 1200, height: 800 }, phone: { width: 390, height: 800, isMobile: true } };
const DEADLINE = 120_000;

async function look(page, name, { drawn, says, keys, told }, size) {
  await page.goto(`${url}/#${name}`);
  await page.waitForSelector(drawn, { timeout: DEADLINE });
  await page.waitForFunction((words) => document.getElementById("main").innerText.includes(words), { timeout: DEADLINE }, says);
  if (keys) {
    const before = await page.$eval(told, (element) => element.innerText);
    for (const key of keys) await page.keyboard.press(key);
    const after = await page.$eval(told, (element) => element.innerText);
    if (before === after) throw new Error(`${name}: expected other words in ${told} behind the keys ${keys}, found the same: ${after}`);
  }
  const wider = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
  if (wider > 0) throw new Error(`${name}, ${size}: expected a page as wide as its window, found ${wider} pixels more`);
  await page.screenshot({ path: `${pictures}/${name}-${size}.png` });
}

async function main() {
  const browser = await puppeteer.launch({
    executablePath: `${home}/chromium`,
    args: ["--no-sandbox", "--headless=new", "--disable-gpu", "--disable-dev-shm-usage"],
    env: { ...process.env, LD_LIBRARY_PATH: `${home}/al2023/lib`, FONTCONFIG_PATH: `${home}/fonts/fonts`, LC_ALL: "en_US.UTF-8", LANG: "en_US.UTF-8", HOME: pictures },
  });
  const wrong = [];
  const page = await browser.newPage();
  page.on("console", (message) => ["error", "warn"].includes(message.type()) && wrong.push(message.text()));
  page.on("pageerror", (error) => wrong.push(error.stack));
  page.on("requestfailed", (request) => wrong.push(`${request.url()}: ${request.failure()?.errorText}`));
  for (const [size, viewport] of Object.entries(SIZES)) {
    await page.setViewport(viewport);
    for (const [name, view] of Object.entries(VIEWS)) await look(page, name, view, size);
  }
  await browser.close();
  if (wrong.length) throw new Error(`the browser complains: ${wrong.join("; ")}`);
  console.log(`${Object.keys(VIEWS).length} views in ${Object.keys(SIZES).length} sizes, as ${pictures}/*.png`);
}

main().catch((error) => {
  console.error(error.message);
  process.exit(1);
});
