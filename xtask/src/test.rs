//! The lanes: what is checked, what each needs, and how long it took.

use crate::error::{Error, Result};
use crate::need::Need;
use crate::{floors, foreign, process, python, rewards, sglang, smollm2, stores, ucx};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::time::{Duration, Instant};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Install what is missing, and fail when a lane is skipped.
    #[arg(long)]
    ci: bool,
    /// The long forms of the loops that have one (kills, fuzzing).
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
    run: fn(&Context) -> Result<()>,
}

struct Context {
    root: PathBuf,
    log: PathBuf,
    long: bool,
    ci: bool,
}

const LANES: &[Lane] = &[
    Lane { name: "fmt", what: "formatting; no marker of a merge is left", needs: &[], run: fmt },
    Lane {
        name: "leak",
        what: "the default features pull in no torch, CUDA, UCX, TLS, HTTP or tokio, and need no C compiler",
        needs: &[],
        run: leak,
    },
    Lane {
        name: "floors",
        what: "crates, and rooms of transport, know only what lies below them; none has more than 12,000 lines, or 25 names at its root",
        needs: &[],
        run: |c| {
            c.cargo(&["test", "-p", "xtask", "floors"])?;
            floors::check(&c.root)
        },
    },
    Lane {
        name: "unit",
        what: "codec, transport, buffer, bridge and the command, without libtorch; kill -9 at 16 points",
        needs: &[],
        run: unit,
    },
    Lane { name: "clippy", what: "lints, with and without libtorch", needs: &[Need::Libtorch], run: clippy },
    Lane {
        name: "doc",
        what: "documentation without a broken link, packages that could be published",
        needs: &[Need::Libtorch],
        run: doc,
    },
    Lane {
        name: "torch",
        what: "models, losses, exact resume, the embedded engine in every dialect, the loop's modes",
        needs: &[Need::Libtorch],
        run: torch,
    },
    Lane {
        name: "sglang",
        what: "the loop and the engine suite against SGLang 0.5.23 without its GPU kernels, our logits and chat templates against transformers'",
        needs: &[Need::Libtorch, Need::Sglang, Need::Smollm2, Need::Python],
        run: with_sglang,
    },
    Lane {
        name: "python",
        what: "the wheel, alone, with torch and transformers, beside SGLang and vLLM",
        needs: &[Need::Sglang, Need::Python],
        run: |c| python::test(&c.root, &crate::cache_dir()?, &c.log),
    },
    Lane {
        name: "rewards",
        what: "the reward `math` against math-verify, hooks with reasoning-gym",
        needs: &[Need::Rewards],
        run: with_rewards,
    },
    Lane {
        name: "stores",
        what: "the suite of stores on real radosgw, azurite and moto",
        needs: &[Need::Stores],
        run: with_stores,
    },
    Lane {
        name: "ucx",
        what: "links, relays and publishers over UCX 1.14 and 1.22: TCP, shared memory, network namespaces, killed and lying peers",
        needs: &[Need::Ucx],
        run: with_ucx,
    },
    Lane {
        name: "kills",
        what: "kill -9 of publisher, follower and relay at 16 points and at random moments, and of a run over prompts",
        needs: &[],
        run: |c| c.looped(light_test(), "kills"),
    },
    Lane {
        name: "crash",
        what: "kill -9 of trainer, follower and engine at 16 points",
        needs: &[Need::Libtorch],
        run: |c| c.looped(torch_test(), "crash"),
    },
    Lane {
        name: "demo",
        what: "the demo, a few steps of it",
        needs: &[Need::Libtorch],
        run: |c| c.logged(Command::new("cargo").args(["xtask", "demo", "--smoke"])),
    },
    Lane {
        name: "learner",
        what: "the wheel's learner through the suite of learners and in the loop; lane `python` makes the wheel",
        needs: &[Need::Sglang, Need::Python],
        run: |c| python::learn(&c.root, &crate::cache_dir()?, &c.log),
    },
    Lane {
        name: "loom",
        what: "the log's reservations and commits in every order of threads",
        needs: &[],
        run: loom,
    },
    Lane { name: "fuzz", what: "fuzzing, 20 s a target", needs: &[Need::CargoFuzz], run: fuzz },
    Lane {
        name: "asan",
        what: "the log's maps and foreign calls under AddressSanitizer",
        needs: &[Need::CargoFuzz],
        run: asan,
    },
    Lane {
        name: "miri",
        what: "the log's layout, bookkeeping and recovery, the codec with its vector paths under Miri",
        needs: &[Need::Miri],
        run: miri,
    },
    Lane {
        name: "neon",
        what: "the codec on a 64-bit Arm, emulated; the light crates compile for it",
        needs: &[Need::Arm],
        run: neon,
    },
    Lane {
        name: "macos",
        what: "codec, stores and publications compile for macOS",
        needs: &[Need::Macos],
        run: |c| {
            let light = ["-p", "driftless-delta", "-p", "driftless-store", "-p", "driftless-transport"];
            c.logged(foreign::macos().args(light))
        },
    },
    Lane {
        name: "gpu",
        what: "the learner on CUDA against the CPU, its bits twice, a few steps of the demo, speeds",
        needs: &[Need::Libtorch, Need::Gpu],
        run: gpu,
    },
];

/// Lanes that run only when they are named: `unit` runs `kills`, and not every machine can have what the others need.
const BY_NAME: &[&str] = &["kills", "neon", "macos", "gpu"];

/// Lanes that have little to do at once. They run one after another beside the others, and never build the command
/// where those do: cargo puts it in one place, with the features that were asked for last.
const BESIDE: &[&str] = &["python", "rewards", "stores", "loom", "fuzz", "asan", "miri"];

/// Features of the lanes without libtorch.
const LIGHT: &str = "driftless/cli,driftless/failpoints,driftless-store/conformance,driftless-bridge/conformance,driftless-trainer/conformance,driftless-delta/cuda";

/// The same and libtorch. What the two sets share is built once.
const ALL: &str = "driftless/failpoints,driftless-store/conformance,driftless-bridge/conformance,driftless-trainer/conformance,driftless-delta/cuda,driftless/torch";

/// Crates that must not be in the build with the default features.
const HEAVY: &[&str] = &[
    "tch",
    "torch-sys",
    "cudarc",
    "axum",
    "hyper",
    "reqwest",
    "tokio",
    "rustls",
    "native-tls",
    "openssl",
    "ring",
    "aws-lc-rs",
    "bindgen",
    "libloading",
    "driftless-ucx-sys",
];

pub(crate) fn run(options: &Options) -> Result<()> {
    let root = crate::workspace();
    let chosen = chosen(&options.lanes)?;
    if options.ci {
        install(&chosen)?;
    }
    let (beside, others): (Vec<&'static Lane>, Vec<_>) =
        chosen.into_iter().partition(|lane| BESIDE.contains(&lane.name));
    let run_one = |lane: &'static Lane| (lane, run_lane(lane, &root, options));
    // Closed as soon as no lane that makes a wheel is to come.
    let (wheel, no_wheel_to_come) = mpsc::channel::<()>();
    let report = std::thread::scope(|scope| {
        let beside = scope.spawn(|| {
            let (makes_wheel, rest): (Vec<_>, Vec<_>) = beside.into_iter().partition(|l| l.name == "python");
            let mut report: Vec<_> = makes_wheel.into_iter().map(run_one).collect();
            drop(wheel);
            report.extend(rest.into_iter().map(run_one));
            report
        });
        let mut report = Vec::new();
        for lane in others {
            if lane.name == "learner" {
                let _ = no_wheel_to_come.recv();
            }
            report.push(run_one(lane));
        }
        report.extend(beside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        report
    });
    summarise(&report, options.ci)
}

enum Outcome {
    Passed(Duration),
    Failed(Duration),
    Skipped(String),
}

fn chosen(names: &[String]) -> Result<Vec<&'static Lane>> {
    if let Some(name) = names.iter().find(|n| LANES.iter().all(|l| l.name != n.as_str())) {
        let known: Vec<_> = LANES.iter().map(|l| l.name).collect();
        return Err(Error::Check {
            what: "lane".to_owned(),
            expected: known.join(", "),
            found: name.clone(),
        });
    }
    let wanted = |lane: &&Lane| match names {
        [] => !BY_NAME.contains(&lane.name),
        names => names.iter().any(|n| n == lane.name),
    };
    Ok(LANES.iter().filter(wanted).collect())
}

fn install(lanes: &[&Lane]) -> Result<()> {
    let needed = |need: &&Need| lanes.iter().any(|lane| lane.needs.contains(need));
    Need::ALL.iter().filter(needed).try_for_each(|need| need.install())
}

fn run_lane(lane: &Lane, root: &Path, options: &Options) -> Outcome {
    let missing = lane.needs.iter().filter_map(|need| need.missing()).collect::<Vec<_>>();
    if !missing.is_empty() {
        return Outcome::Skipped(missing.join("; "));
    }
    let log = root.join("target/lanes").join(format!("{}.log", lane.name));
    // An old log would only confuse; that it may be absent is fine.
    let _ = std::fs::remove_file(&log);
    println!("{:8} {} ...", lane.name, lane.what);
    let start = Instant::now();
    let context = Context { root: root.to_path_buf(), log: log.clone(), long: options.long, ci: options.ci };
    match (lane.run)(&context) {
        Ok(()) => {
            println!("{:8} ok, {:.0} s", lane.name, start.elapsed().as_secs_f64());
            Outcome::Passed(start.elapsed())
        }
        Err(error) => {
            println!("{}", process::tail(&log, 60));
            println!("{:8} FAILED: {error}", lane.name);
            Outcome::Failed(start.elapsed())
        }
    }
}

fn summarise(report: &[(&Lane, Outcome)], ci: bool) -> Result<()> {
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    println!("\nlane       time  result");
    for (lane, outcome) in report {
        match outcome {
            Outcome::Passed(time) => {
                passed += 1;
                println!("{:8} {:5.0} s  ok", lane.name, time.as_secs_f64());
            }
            Outcome::Failed(time) => {
                failed += 1;
                println!(
                    "{:8} {:5.0} s  FAILED, see target/lanes/{}.log",
                    lane.name,
                    time.as_secs_f64(),
                    lane.name
                );
            }
            Outcome::Skipped(why) => {
                skipped += 1;
                println!("{:8}       -  skipped: {why}", lane.name);
            }
        }
    }
    println!("\nlanes: {passed} passed, {failed} failed, {skipped} skipped");
    // Where everything can be installed, a skip hides something.
    let bad = if ci { failed + skipped } else { failed };
    if bad == 0 { Ok(()) } else { Err(Error::Lanes(bad)) }
}

impl Context {
    fn logged(&self, command: &mut Command) -> Result<()> {
        if self.ci {
            // Without it, tests of what a C++ compiler makes say that they do nothing.
            command.env("DRIFTLESS_CXX_REQUIRED", "1");
        }
        process::run_logged(command.current_dir(&self.root), &self.log)
    }

    fn cargo(&self, args: &[&str]) -> Result<()> {
        self.logged(Command::new("cargo").args(args))
    }

    /// The test program of this name, alone.
    fn looped(&self, mut command: Command, name: &str) -> Result<()> {
        command.args(["--test", name, "--", "--nocapture"]);
        if self.long {
            command.env("DRIFTLESS_LONG", "1");
        }
        self.logged(&mut command)
    }
}

/// `cargo test` without libtorch. Every lane selects the same packages and features, because cargo builds a
/// crate once more for each other set that a selection amounts to.
pub(crate) fn light_test() -> Command {
    let mut command = Command::new("cargo");
    command.args(["test", "--features", LIGHT]);
    command
}

/// `cargo test` with libtorch.
pub(crate) fn torch_test() -> Command {
    let mut command = Command::new("cargo");
    // The Python package links only as an extension; its lane is `python`.
    command.args(["test", "--workspace", "--exclude", "driftless-python", "--features", ALL]);
    command
}

fn fmt(context: &Context) -> Result<()> {
    context.cargo(&["fmt", "--all", "--check"])?;
    // It ends with 0 where it finds some, and with another number outside of a clone too.
    let mut markers = Command::new("git");
    markers.current_dir(&context.root).args(["grep", "-nE", "^(<{7}|>{7}) "]);
    match markers.output() {
        Ok(found) if found.status.success() => Err(Error::Check {
            what: "markers of a merge".to_owned(),
            expected: "none".to_owned(),
            found: String::from_utf8_lossy(&found.stdout).into_owned(),
        }),
        _ => Ok(()),
    }
}

fn leak(context: &Context) -> Result<()> {
    let mut tree = Command::new("cargo");
    tree.current_dir(&context.root).args(["tree", "-p", "driftless"]);
    let tree =
        process::output(tree.args(["--edges", "normal,build", "--prefix", "none", "--format", "{p}"]))?;
    let name = |line: &str| line.split(' ').next().unwrap_or_default().to_owned();
    let found: Vec<_> = tree.lines().map(name).filter(|n| HEAVY.contains(&n.as_str())).collect();
    if !found.is_empty() {
        return Err(Error::Check {
            what: "crates of the default features".to_owned(),
            expected: format!("none of {}", HEAVY.join(", ")),
            found: found.join(", "),
        });
    }
    let mut clippy = Command::new("cargo");
    clippy.args(["clippy", "-p", "driftless", "--", "-D", "warnings"]);
    clippy.env("CC", "/nonexistent").env("CXX", "/nonexistent");
    // The other lanes have a C compiler, and would build again what this one builds without.
    context.logged(clippy.env("CARGO_TARGET_DIR", context.root.join("target/light")))
}

fn unit(context: &Context) -> Result<()> {
    // Each command has a deadline; from a clean clone, building takes as long as the tests do.
    context.logged(light_test().arg("--no-run"))?;
    let mut command = light_test();
    // A run takes an hour, so that it tells all that fails.
    command.arg("--no-fail-fast");
    if context.long {
        command.env("DRIFTLESS_LONG", "1");
    }
    context.logged(&mut command)
}

fn clippy(context: &Context) -> Result<()> {
    // The command as most users build it, then everything.
    context.cargo(&["clippy", "-p", "driftless", "--", "-D", "warnings"])?;
    context.cargo(&["clippy", "--workspace", "--all-targets", "--features", ALL, "--", "-D", "warnings"])
}

fn doc(context: &Context) -> Result<()> {
    context.logged(
        Command::new("cargo")
            .args(["doc", "--workspace", "--no-deps", "--features", ALL])
            .env("RUSTDOCFLAGS", "-D warnings"),
    )?;
    packages(context)
}

/// What would be published, in the order of the crates' needs. The lanes before have compiled it.
fn packages(context: &Context) -> Result<()> {
    // Into a directory of its own, so that nothing there looks like a crate of the workspace.
    let target = context.root.join("target/lanes/packages");
    let publish = ["publish", "--workspace", "--dry-run", "--no-verify", "--allow-dirty"];
    context.logged(Command::new("cargo").args(publish).env("CARGO_TARGET_DIR", target))
}

fn torch(context: &Context) -> Result<()> {
    let tests = [
        "algorithms",
        "checkpoint",
        "engine",
        "in_place",
        "loss",
        "model",
        "policy",
        "suite",
        "task",
        "train",
    ];
    context.logged(torch_test().arg("--lib").args(tests.map(|name| ["--test", name]).as_flattened()))
}

fn with_sglang(context: &Context) -> Result<()> {
    let cache = crate::cache_dir()?;
    let work = context.root.join("target/lanes/sglang");
    let server = sglang::Conformance::start(&cache, &work, process::free_port()?)?;
    let mut beside = torch_test();
    beside.args(["--test", "sglang", "--test", "rendezvous", "--", "--nocapture"]);
    let mut ours = torch_test();
    ours.args(["--test", "task", "--test", "families", "--test", "chat", "--test", "quantize"]);
    ours.args(["--", "--nocapture"]);
    ours.env("DRIFTLESS_TRANSFORMERS_PYTHON", sglang::python(&cache));
    ours.env("DRIFTLESS_CHAT_TEMPLATES", python::chat_templates(&cache)?);
    if let Some(model) = smollm2::present(&cache) {
        beside.env("DRIFTLESS_REAL_CHECKPOINT", &model);
        ours.env("DRIFTLESS_REAL_CHECKPOINT", model);
    }
    context.logged(server.tell(&mut beside))?;
    // The bridge has SGLang's own unpickler read what it wrote.
    context.logged(server.tell(torch_test().args(["--lib", "payload"])))?;
    drop(server);
    context.logged(&mut ours)
}

fn with_rewards(context: &Context) -> Result<()> {
    let python = rewards::python(&crate::cache_dir()?);
    let pairs = ["trainer/tests/math/pairs.py", "--check", "trainer/tests/math/pairs.jsonl"];
    context.logged(Command::new(&python).args(pairs))?;
    let mut hooks = light_test();
    hooks.args(["--test", "hooks", "--", "--nocapture", "reasoning_gym"]);
    context.logged(hooks.env("DRIFTLESS_REWARDS_PYTHON", python))
}

fn with_stores(context: &Context) -> Result<()> {
    let servers = stores::Servers::start(&crate::cache_dir()?, &context.root.join("target/lanes/stores"))?;
    let mut command = light_test();
    command.args(["--test", "servers", "--", "--ignored", "--nocapture"]);
    context.logged(servers.tell(&mut command))
}

fn with_ucx(context: &Context) -> Result<()> {
    for (version, libraries) in ucx::releases(&crate::cache_dir()?) {
        let mut command = light_test();
        command.args(["--test", "fabric", "--test", "relay_ucx", "--test", "cli"]);
        command.args(["--", "--nocapture"]).env("DRIFTLESS_UCX_REQUIRED", version);
        context.logged(command.env("LD_LIBRARY_PATH", libraries))?;
    }
    Ok(())
}

fn loom(context: &Context) -> Result<()> {
    context.logged(
        Command::new("cargo")
            .args(["test", "-p", "driftless-buffer", "--lib", "interleavings"])
            .env("RUSTFLAGS", "--cfg loom")
            // Another cfg is another build of every dependency.
            .env("CARGO_TARGET_DIR", context.root.join("target/loom")),
    )
}

fn fuzz(context: &Context) -> Result<()> {
    let targets =
        process::output(Command::new("cargo").current_dir(&context.root).args(["+nightly", "fuzz", "list"]))?;
    // The short form takes the same path every time: a finding there is a regression, not luck.
    let (limit, seed) =
        if context.long { ("-max_total_time=1800", "-seed=0") } else { ("-max_total_time=20", "-seed=1") };
    for target in targets.lines() {
        context.cargo(&["+nightly", "fuzz", "run", target, "--", limit, seed, "-max_len=16384"])?;
    }
    Ok(())
}

fn asan(context: &Context) -> Result<()> {
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    context.logged(
        Command::new("cargo")
            .args(["+nightly", "test", "-p", "driftless-buffer", "--lib", "--target", &target])
            .env("RUSTFLAGS", "-Zsanitizer=address")
            // The crash tests forget reservations on purpose, as a crash does.
            .env("ASAN_OPTIONS", "detect_leaks=0")
            .env("CARGO_TARGET_DIR", context.root.join("target/asan")),
    )
}

fn miri(context: &Context) -> Result<()> {
    let own = context.root.join("target/miri");
    let log = ["--lib", "--", "layout", "ledger", "wire", "cursor", "tests::crash"];
    context.logged(foreign::miri("driftless-buffer").args(log).env("CARGO_TARGET_DIR", &own))?;
    let codec = ["--lib", "--test", "golden"];
    context.logged(foreign::miri("driftless-delta").args(codec).env("CARGO_TARGET_DIR", &own))
}

fn neon(context: &Context) -> Result<()> {
    let light = ["-p", "driftless-delta", "-p", "driftless-buffer", "-p", "driftless-bridge"];
    context.logged(foreign::arm("check").args(light).args(["-p", "driftless-transport"]))?;
    let tests = ["--lib", "--test", "golden", "--test", "stranger"];
    context.logged(foreign::arm("test").args(["-p", "driftless-delta"]).args(tests))
}

fn gpu(context: &Context) -> Result<()> {
    let learner = ["bench", "-p", "driftless-torch", "--bench", "learner", "--"];
    let device = ["--device", "cuda:0"];
    for args in [
        &["check"][..],
        &["deterministic"],
        &["speed", "--shapes", "0.6b", "--lengths", "2x4096"],
        &["speed", "--shapes", "0.6b", "--lengths", "mixed:16384"],
    ] {
        // cuBLAS computes the same bits each time only then.
        let mut bench = Command::new("cargo");
        bench.args(learner).args(args).args(device).env("CUBLAS_WORKSPACE_CONFIG", ":4096:8");
        context.logged(&mut bench)?;
    }
    context.cargo(&[
        "bench",
        "-p",
        "driftless-delta",
        "--features",
        "cuda",
        "--bench",
        "cuda",
        "--",
        "256",
        "1%",
    ])?;
    context.logged(Command::new("cargo").args(["xtask", "demo", "--smoke"]).args(device))
}
