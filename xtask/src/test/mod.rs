//! The lanes: what is checked, what each needs, and how long it took.

mod lanes;
mod programs;
mod queue;
mod record;

use crate::error::{Error, Result};
use crate::need::Need;
use crate::process;
use lanes::LANES;
use programs::Programs;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

pub(crate) use programs::{build_without_torch, cargo_test, command_for_tests};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Install what is missing, and fail when a lane is skipped.
    #[arg(long)]
    ci: bool,
    /// The long forms of the loops that have one (kills, fuzzing), and what only they run.
    #[arg(long)]
    long: bool,
    /// Run only these lanes.
    #[arg(value_name = "LANE")]
    lanes: Vec<String>,
}

struct Lane {
    name: &'static str,
    what: &'static str,
    needs: &'static [Need],
    /// Test programs that it runs; they are built before, for all lanes at once.
    programs: Tests,
    /// Lanes whose product it takes; they run before it even where they are not named.
    takes: &'static [&'static str],
    /// Lanes that come before it, where they run at all.
    after: &'static [&'static str],
    run: fn(&Context) -> Result<()>,
}

/// Test programs of a lane, as `package::target` or `package::*`.
enum Tests {
    None,
    Some(&'static [&'static str]),
    /// All of the workspace.
    All,
}

/// What a lane is given.
struct Context<'a> {
    root: &'a Path,
    log: PathBuf,
    options: &'a Options,
    built: &'a OnceLock<Programs>,
}

/// What all lanes write from an empty target, in GB; tools that are installed come on top.
const DISK_GB: u64 = 15;

/// The lane that builds the test programs.
const BUILD: &str = "build";

enum Outcome {
    Passed(Duration),
    /// After so long, and why.
    Failed(Duration, String),
    Skipped(String),
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let root = crate::workspace();
    let chosen = chosen(&options.lanes)?;
    if options.ci {
        install(&chosen)?;
    }
    if let Some(free) = disk_gb(&root).filter(|free| options.lanes.is_empty() && *free < DISK_GB) {
        println!(
            "disk     {free} GB are free; from an empty target the lanes write {DISK_GB}, and fail where they end"
        );
    }
    let begin = Instant::now();
    let (all, names) = wanted(&chosen);
    let built = OnceLock::new();
    let build = |context: &Context| build(context, if all { None } else { Some(&names) });
    let jobs = chosen.iter().map(|lane| queue::Job { name: lane.name, after: before(lane), what: *lane });
    let mut report = queue::run(jobs.collect(), |lane: &'static Lane| {
        let context = Context { root: &root, log: log(lane.name), options, built: &built };
        let run = |context: &Context| if lane.name == BUILD { build(context) } else { (lane.run)(context) };
        (lane, run_lane(lane, &context, run))
    });
    report.sort_by_key(|(lane, _)| LANES.iter().position(|other| other.name == lane.name));
    if report.len() != chosen.len() {
        let ran: Vec<_> = report.iter().map(|(lane, _)| lane.name).collect();
        return Err(Error::check("lanes that ran", format!("{}", chosen.len()), ran.join(", ")));
    }
    // Where everything can be installed, a skip hides something; and whoever names a lane wants to know what it says.
    summarise(&report, options.ci || !options.lanes.is_empty(), begin.elapsed())
}

/// What is free where the lanes build, in whole GB, if the system tells.
fn disk_gb(root: &Path) -> Option<u64> {
    let found = rustix::fs::statvfs(root).ok()?;
    Some(found.f_bavail.saturating_mul(found.f_frsize) / 1_000_000_000)
}

/// What a lane's commands print.
fn log(lane: &str) -> PathBuf {
    crate::workspace().join("target/lanes").join(format!("{lane}.log"))
}

/// The lanes of these names, or those that run without being named; with those that make what they take.
fn chosen(names: &[String]) -> Result<Vec<&'static Lane>> {
    if let Some(name) = names.iter().find(|n| LANES.iter().all(|l| l.name != n.as_str())) {
        let known: Vec<_> = LANES.iter().map(|l| l.name).collect();
        return Err(Error::check("lane", known.join(", "), name));
    }
    let wanted = |lane: &&Lane| match names {
        [] => !lanes::BY_NAME.contains(&lane.name),
        names => names.iter().any(|n| n == lane.name),
    };
    let taken: BTreeSet<_> = LANES.iter().filter(wanted).flat_map(taken).collect();
    Ok(LANES.iter().filter(|lane| wanted(lane) || taken.contains(lane.name)).collect())
}

/// The lanes whose product this one takes.
fn taken(lane: &Lane) -> Vec<&'static str> {
    let build = (!matches!(lane.programs, Tests::None)).then_some(BUILD);
    lane.takes.iter().copied().chain(build).collect()
}

/// Whether the lanes run all test programs, and else which.
fn wanted(lanes: &[&Lane]) -> (bool, Vec<&'static str>) {
    let all = lanes.iter().any(|lane| matches!(lane.programs, Tests::All));
    let some = |lane: &&Lane| match lane.programs {
        Tests::Some(names) => names.to_vec(),
        Tests::None | Tests::All => Vec::new(),
    };
    (all, lanes.iter().flat_map(some).collect())
}

/// The lanes that come before this one.
fn before(lane: &Lane) -> Vec<&'static str> {
    lane.after.iter().copied().chain(taken(lane)).collect()
}

fn build(context: &Context, names: Option<&[&str]>) -> Result<()> {
    let built = Programs::build(context, names)?;
    // Only this lane fills it, once.
    let _ = context.built.set(built);
    Ok(())
}

fn install(lanes: &[&Lane]) -> Result<()> {
    let needed: BTreeSet<Need> = lanes.iter().flat_map(|lane| lane.needs.iter().copied()).collect();
    needed.into_iter().try_for_each(Need::install)
}

fn run_lane(lane: &Lane, context: &Context, run: impl Fn(&Context) -> Result<()>) -> Outcome {
    let missing = lane.needs.iter().filter_map(|need| need.missing()).collect::<Vec<_>>();
    if !missing.is_empty() {
        return Outcome::Skipped(missing.join("; "));
    }
    // An old log would only confuse; that it may be absent is fine.
    let _ = std::fs::remove_file(&context.log);
    println!("{:8} {} ...", lane.name, lane.what);
    let start = Instant::now();
    match run(context) {
        Ok(()) => {
            println!("{:8} ok, {:.0} s", lane.name, start.elapsed().as_secs_f64());
            Outcome::Passed(start.elapsed())
        }
        Err(error) => {
            println!("{}", process::tail(&context.log, 60));
            let free =
                disk_gb(context.root).map_or(String::new(), |free| format!(" ({free} GB of disk are free)"));
            println!("{:8} FAILED: {error}{free}", lane.name);
            Outcome::Failed(start.elapsed(), error.to_string())
        }
    }
}

fn summarise(report: &[(&Lane, Outcome)], all: bool, whole: Duration) -> Result<()> {
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    let recorded = record::last();
    println!("\nlane       time  recorded  result");
    for (lane, outcome) in report {
        let before = recorded.get(lane.name).map_or("-".to_owned(), |seconds| format!("{seconds} s"));
        let (time, result) = match outcome {
            Outcome::Passed(time) => {
                passed += 1;
                (format!("{:.0} s", time.as_secs_f64()), "ok".to_owned())
            }
            Outcome::Failed(time, _) => {
                failed += 1;
                let log = format!("FAILED, see target/lanes/{}.log", lane.name);
                (format!("{:.0} s", time.as_secs_f64()), log)
            }
            Outcome::Skipped(why) => {
                skipped += 1;
                ("-".to_owned(), format!("skipped: {why}"))
            }
        };
        println!("{:8} {time:>6}  {before:>8}  {result}", lane.name);
    }
    for (lane, outcome) in report {
        if let Outcome::Failed(_, why) = outcome {
            println!("\n{} failed: {why}", lane.name);
            process::failures(&log(lane.name), 25).iter().for_each(|line| println!("  {line}"));
        }
    }
    println!("\nlanes: {passed} passed, {failed} failed, {skipped} skipped, {} s in all", whole.as_secs());
    let bad = if all { failed + skipped } else { failed };
    if bad == 0 { Ok(()) } else { Err(Error::Lanes(bad)) }
}

impl Context<'_> {
    fn logged(&self, command: &mut Command) -> Result<()> {
        process::run_logged(self.told(command).current_dir(self.root), &self.log)
    }

    /// The standard output of a command of the workspace; what it says beside that is logged.
    fn output(&self, command: &mut Command) -> Result<String> {
        process::output_logged(self.told(command).current_dir(self.root), &self.log)
    }

    fn told<'c>(&self, command: &'c mut Command) -> &'c mut Command {
        if self.options.ci {
            // Without it, tests of what a C++ compiler makes say that they do nothing.
            command.env("DRIFTLESS_CXX_REQUIRED", "1");
        }
        if self.options.long {
            command.env("DRIFTLESS_LONG", "1");
        }
        command
    }

    fn cargo(&self, args: &[&str]) -> Result<()> {
        self.logged(Command::new("cargo").args(args))
    }

    fn programs(&self) -> Result<&Programs> {
        let missing = || Error::check("test programs", "a build", "none, see target/lanes/build.log");
        self.built.get().ok_or_else(missing)
    }

    /// A test program of the build.
    fn program(&self, name: &str) -> Result<Command> {
        self.programs()?.command(name)
    }

    /// Runs a test program where cargo would.
    fn run(&self, program: &mut Command) -> Result<()> {
        process::run_logged(self.told(program), &self.log)
    }

    /// Runs the tests of a command that match its filters. None that does is a failure: a test that was renamed would
    /// be missed by nothing else.
    fn some(&self, tests: &mut Command) -> Result<()> {
        let before = process::tests_passed(&self.log);
        self.run(tests)?;
        match process::tests_passed(&self.log) > before {
            true => Ok(()),
            false => Err(Error::check(&process::shown(tests), "a test that passes", "none")),
        }
    }
}
