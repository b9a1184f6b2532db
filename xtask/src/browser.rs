//! Chromium from npm, which looks at the page of `driftless dashboard`.
//!
//! `@sparticuz/chromium` packs a build of Chromium with the libraries that a server lacks; `puppeteer-core` drives it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::install;
use crate::process::{self, Background, found};

/// The directory in the cache: another one for other packages.
const HOME: &str = "chromium-147.0.0-puppeteer-core-24.43.1";
const PACKAGES: [&str; 2] = ["@sparticuz/chromium@147.0.0", "puppeteer-core@24.43.1"];
/// A file of a complete installation.
const PROGRAM: &str = "chromium";
/// The command reads the run before it listens.
const READY: Duration = Duration::from_secs(60);
/// What a run told is on its page within its poll. The browser gives up before that, and says what it waited for.
const SEEN: Duration = Duration::from_secs(360);
/// The step whose answers are exported: none of the newest ones.
const EXPORTED: &str = "2";
/// What a page behind a token asks for here.
const TOKEN: &str = "a-token-of-the-test";

/// What is missing and how to get it, or `None`.
pub(crate) fn missing(cache: &Path) -> Option<String> {
    let absent = !home(cache).join(PROGRAM).is_file();
    absent.then(|| format!("{}, 330 MB (cargo xtask test --ci demo)", PACKAGES.join(" and ")))
}

/// Installs it into the cache; npm for the system, where that is not there.
pub(crate) fn install(cache: &Path) -> Result<()> {
    if !found("npm") {
        process::apt("demo", &["npm"])?;
    }
    println!("demo: {}", PACKAGES.join(", "));
    install::into_place(&home(cache), PROGRAM, |partial| {
        let mut npm = Command::new("npm");
        npm.args(["install", "--silent", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix"]);
        process::run(npm.arg(partial).args(PACKAGES))?;
        process::run(Command::new("node").arg(script("unpack.js")).arg(partial))
    })
}

/// What the pictures are for.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Use {
    /// Each view in two sizes, light and dark.
    Test,
    /// Each view once, small enough to be kept.
    Docs,
}

/// Has the browser look at each view of a run's page, and puts the pictures into the directory `pictures`. In a test, it
/// also finds a mismatch that is planted in the run, and opens a page that is exported with the answers of a step.
pub(crate) fn look(
    cache: &Path,
    program: &Path,
    run: &Path,
    pictures: &Path,
    log: &Path,
    purpose: Use,
) -> Result<()> {
    fs::create_dir_all(pictures).map_err(Error::io(pictures))?;
    let (_serving, url) = serve(Command::new(program).arg("dashboard").arg(run), log)?;
    let mut looks = node("look.js", cache, &url);
    looks.arg(pictures).args((purpose == Use::Docs).then_some("docs"));
    process::run_logged(&mut looks, log)?;
    if purpose == Use::Docs {
        return Ok(());
    }
    let mut finds = node("mismatch.js", cache, &url);
    process::run_logged(finds.arg(pictures).arg(run.join("log/learned")), log)?;
    let page = pictures.join("step.html");
    let mut exports = Command::new(program);
    exports.arg("dashboard").arg(run).args(["--step", EXPORTED, "--export"]).arg(&page);
    process::run_logged(&mut exports, log)?;
    let mut opens = Command::new("node");
    opens.arg(script("export.js")).arg(home(cache)).arg(&page).arg(pictures).arg(EXPORTED);
    process::run_logged(&mut opens, log)
}

/// Has the browser watch the page of the run in `run` while `demo` makes that, and kills an engine behind the step
/// `killed`. `files` is a directory for what the page's server and the browser write.
pub(crate) fn watch(
    cache: &Path,
    program: &Path,
    run: &Path,
    killed: usize,
    files: &Path,
    demo: impl FnOnce() -> Result<()>,
) -> Result<()> {
    [run, files].iter().try_for_each(|dir| fs::create_dir_all(dir).map_err(Error::io(*dir)))?;
    let token = files.join("token");
    fs::write(&token, TOKEN).map_err(Error::io(&token))?;
    let mut dashboard = Command::new(program);
    dashboard.arg("dashboard").arg(run).arg("--token-file").arg(&token);
    let (_serving, url) = serve(&mut dashboard, &files.join("dashboard.log"))?;
    let mut watch = node("watch.js", cache, &url);
    watch.args([TOKEN, &killed.to_string()]).arg(files);
    let log = files.join("watch.log");
    let mut watching = Background::start("the browser", &mut watch, &log)?;
    let said = |log: &Path| fs::read_to_string(log).unwrap_or_default();
    watching.wait(|| said(&log).contains("watching"), READY)?;
    demo()?;
    watching.wait_success(SEEN)
}

/// A dashboard that listens, and its address.
fn serve(dashboard: &mut Command, log: &Path) -> Result<(Background, String)> {
    let port = process::free_port()?;
    dashboard.args(["--listen", &format!("127.0.0.1:{port}")]);
    let mut serving = Background::start("the dashboard", dashboard, log)?;
    serving.wait_listening(port, READY)?;
    Ok((serving, format!("http://127.0.0.1:{port}")))
}

/// A script in node, told where the browser and the page are.
fn node(name: &str, cache: &Path, url: &str) -> Command {
    let mut node = Command::new("node");
    node.arg(script(name)).arg(home(cache)).arg(url);
    node
}

fn home(cache: &Path) -> PathBuf {
    cache.join(HOME)
}

fn script(name: &str) -> PathBuf {
    crate::workspace().join("xtask/browser").join(name)
}
