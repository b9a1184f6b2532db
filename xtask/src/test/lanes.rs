//! What each lane runs.

use super::programs::ALL;
use super::{Context, Lane, Tests, cargo_test};
use crate::error::{Error, Result};
use crate::need::Need;
use crate::{
    book, browser, floors, foreign, install, pages, process, python, release, rewards, sglang, smollm2,
    stores, style, ucx,
};
use std::process::Command;

/// In an order that fits: what tells most comes first, and what takes long begins early.
pub(super) const LANES: &[Lane] = &[
    Lane {
        name: "fmt",
        what: "formatting and style; no marker of a merge is left",
        needs: &[],
        programs: Tests::None,
        takes: &[],
        after: &[],
        run: fmt,
    },
    Lane {
        name: "floors",
        what: "crates and their rooms know only what lies below them, and stay small; pages name what is there",
        needs: &[],
        programs: Tests::None,
        takes: &[],
        after: &[],
        run: floors,
    },
    Lane {
        name: "build",
        what: "the test programs and the command",
        needs: &[],
        programs: Tests::None,
        takes: &[],
        after: &[],
        run: |_| Ok(()),
    },
    Lane {
        name: "leak",
        what: "the default features pull in no torch, CUDA, UCX, TLS, HTTP or tokio, and need no C compiler",
        needs: &[],
        programs: Tests::None,
        takes: &[],
        after: &[],
        run: leak,
    },
    Lane {
        name: "miri",
        what: "the log's layout, bookkeeping and recovery, the codec with its vector paths under Miri",
        needs: &[Need::Miri],
        programs: Tests::None,
        takes: &[],
        after: &[],
        run: miri,
    },
    Lane {
        name: "loom",
        what: "the log's reservations and commits in every order of threads",
        needs: &[],
        programs: Tests::None,
        takes: &[],
        after: &[],
        run: loom,
    },
    Lane {
        name: "unit",
        what: "codec, transport, buffer, bridge and the command; kill -9 at 18 points",
        needs: &[],
        programs: Tests::All,
        takes: &[],
        after: &[],
        run: unit,
    },
    Lane {
        name: "wheel",
        what: "the Python package; with --long as users get it, and its size",
        needs: &[Need::Sglang, Need::Python],
        programs: Tests::None,
        takes: &[],
        after: &["build"],
        run: |c| python::build(c.root, &crate::cache_dir()?, &c.log, c.options.long),
    },
    Lane {
        name: "python",
        what: "the wheel alone, with torch and transformers, beside SGLang, with agents of verifiers, OpenAI, Anthropic and TRL",
        needs: &[Need::Sglang, Need::Python, Need::Rewards, Need::Smollm2],
        programs: Tests::None,
        takes: &["wheel"],
        after: &[],
        run: |c| python::test(c.root, &crate::cache_dir()?, &c.log, c.options.long),
    },
    Lane {
        name: "vllm",
        what: "the wheel beside vLLM on the CPU, whose kernels want AVX2",
        needs: &[Need::Sglang, Need::Python, Need::Avx2],
        programs: Tests::None,
        takes: &["wheel"],
        after: &[],
        run: |c| python::test_vllm(c.root, &crate::cache_dir()?, &c.log),
    },
    Lane {
        name: "clippy",
        what: "lints",
        needs: &[Need::Libtorch],
        programs: Tests::None,
        takes: &[],
        after: &["wheel"],
        run: clippy,
    },
    Lane {
        name: "doc",
        what: "documentation and its book without a broken link, packages that could be published",
        needs: &[Need::Libtorch, Need::Mdbook],
        programs: Tests::Some(&["driftless::crash"]),
        takes: &[],
        after: &["build", "clippy"],
        run: doc,
    },
    Lane {
        name: "sglang",
        what: "the loop and the engine suite against SGLang 0.5.23 without its GPU kernels, our logits and chat templates against transformers'",
        needs: &[Need::Libtorch, Need::Sglang, Need::Smollm2, Need::Python],
        programs: Tests::Some(&[
            "driftless::sglang",
            "bridge::sglang",
            "bridge::rendezvous",
            "bridge::lib",
            "trainer::chat",
            "torch::task",
            "torch::families",
            "torch::quantize",
        ]),
        takes: &[],
        after: &[],
        run: with_sglang,
    },
    Lane {
        name: "torch",
        what: "models, losses, exact resume, the embedded engine in every dialect, the loop's modes",
        needs: &[Need::Libtorch],
        programs: Tests::Some(&["torch::lib", "torch::*", "driftless::train"]),
        takes: &[],
        after: &[],
        run: torch,
    },
    Lane {
        name: "learner",
        what: "the wheel's learner through the suite of learners and in the loop",
        needs: &[Need::Sglang, Need::Python],
        programs: Tests::Some(&["trainer::learner", "driftless::learner"]),
        takes: &["wheel"],
        after: &[],
        run: learner,
    },
    Lane {
        name: "rewards",
        what: "the reward `math` against math-verify, hooks with reasoning-gym, event files with tensorboard, figures with opentelemetry, the gateway with the vendors' clients, families of models with transformers and renderers, environments of verifiers and OpenEnv, tools of MCP, a page as a server of MCP",
        needs: &[Need::Rewards],
        programs: Tests::Some(&[
            "trainer::hooks",
            "trainer::hooked",
            "observe::sinks",
            "agent::gateway",
            "agent::sessions",
            "driftless::cli",
        ]),
        takes: &[],
        after: &[],
        run: with_rewards,
    },
    Lane {
        name: "stores",
        what: "the suite of stores on real radosgw, azurite and moto",
        needs: &[Need::Stores],
        programs: Tests::Some(&["store::servers"]),
        takes: &[],
        after: &[],
        run: with_stores,
    },
    Lane {
        name: "ucx",
        what: "links, relays and publishers over UCX 1.14 and 1.22: TCP, shared memory, network namespaces, killed and lying peers",
        needs: &[Need::Ucx],
        programs: Tests::Some(&["relay::fabric", "relay::relay_ucx", "driftless::cli"]),
        takes: &[],
        after: &[],
        run: with_ucx,
    },
    Lane {
        name: "kills",
        what: "kill -9 of publisher, follower and relay at 18 points and at random moments, and of a run over prompts",
        needs: &[],
        programs: Tests::Some(&["driftless::kills"]),
        takes: &[],
        after: &[],
        run: |c| c.run(c.program("driftless::kills")?.arg("--nocapture")),
    },
    Lane {
        name: "crash",
        what: "kill -9 of trainer, follower and engine at 16 points; signals and pipes of the command with libtorch",
        needs: &[Need::Libtorch],
        programs: Tests::Some(&["driftless::crash"]),
        takes: &[],
        after: &[],
        run: |c| c.run(c.program("driftless::crash")?.arg("--nocapture")),
    },
    Lane {
        name: "demo",
        what: "the demo, a few steps of it with an engine that is killed, and its page in Chromium meanwhile and afterwards",
        needs: &[Need::Libtorch, Need::Browser],
        programs: Tests::Some(&["driftless::crash"]),
        takes: &[],
        after: &[],
        run: demo,
    },
    Lane {
        name: "fuzz",
        what: "fuzzing, 5 s a target; with --long half an hour",
        needs: &[Need::CargoFuzz],
        programs: Tests::None,
        takes: &[],
        after: &[],
        run: fuzz,
    },
    Lane {
        name: "asan",
        what: "the log's maps and foreign calls under AddressSanitizer",
        needs: &[Need::CargoFuzz],
        programs: Tests::None,
        takes: &[],
        after: &[],
        run: asan,
    },
    Lane {
        name: "neon",
        what: "the codec on a 64-bit Arm, emulated; the light crates compile for it",
        needs: &[Need::Arm],
        programs: Tests::None,
        takes: &[],
        after: &[],
        run: neon,
    },
    Lane {
        name: "macos",
        what: "codec, stores and publications compile for macOS",
        needs: &[Need::Macos],
        programs: Tests::None,
        takes: &[],
        after: &[],
        run: |c| {
            let light = ["-p", "driftless-delta", "-p", "driftless-store", "-p", "driftless-transport"];
            c.logged(foreign::macos().args(light))
        },
    },
    Lane {
        name: "gpu",
        what: "the codec and the learner on CUDA against the CPU, its bits twice, a few steps of the demo, speeds",
        needs: &[Need::Libtorch, Need::Gpu],
        programs: Tests::Some(&["delta::cuda"]),
        takes: &[],
        after: &[],
        run: gpu,
    },
];

/// Lanes that run only when they are named: `unit` runs `kills`, and not every machine can have what the others need.
pub(super) const BY_NAME: &[&str] = &["kills", "neon", "macos", "gpu"];

/// Programs that `unit` leaves to lane `torch`, and those that do nothing without a server.
const NOT_UNIT: [&str; 4] = ["torch::", "driftless::train", "driftless::crash", "driftless::sglang"];

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

fn floors(context: &Context) -> Result<()> {
    context.cargo(&["test", "-p", "xtask"])?;
    floors::check(context.root)?;
    pages::check(context.root)
}

fn fmt(context: &Context) -> Result<()> {
    context.cargo(&["fmt", "--all", "--check"])?;
    style::check(context.root)?;
    // It ends with 1 where it finds none, and with another number outside of a clone.
    let mut markers = Command::new("git");
    markers.current_dir(context.root).args(["grep", "-nE", "^(<{7}|>{7}) "]);
    let found = markers.output().map_err(process::start(&markers))?;
    match found.status.code() {
        Some(1) => Ok(()),
        _ => Err(Error::check("markers of a merge", "none", String::from_utf8_lossy(&found.stdout))),
    }
}

fn leak(context: &Context) -> Result<()> {
    let mut tree = Command::new("cargo");
    tree.current_dir(context.root).args(["tree", "-p", "driftless"]);
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
    let unit = |name: &&str| !NOT_UNIT.iter().any(|other| name.starts_with(other));
    let mut failed = Vec::new();
    // A run takes long, so that it tells all that fails.
    for name in context.programs()?.names().filter(unit) {
        if let Err(error) = context.run(&mut context.program(name)?) {
            failed.push(format!("{name} ({error})"));
        }
    }
    if let Err(error) = context.logged(cargo_test().arg("--doc")) {
        failed.push(format!("examples in the documentation ({error})"));
    }
    if failed.is_empty() {
        return some_ran(context);
    }
    Err(Error::Check {
        what: "tests".to_owned(),
        expected: "none fails".to_owned(),
        found: failed.join(", "),
    })
}

fn clippy(context: &Context) -> Result<()> {
    // Lane `leak` checks the command's crates as most users build them.
    context.cargo(&["clippy", "--workspace", "--all-targets", "--features", ALL, "--", "-D", "warnings"])
}

/// Fails where the lane's programs passed no test at all, because none was found.
fn some_ran(context: &Context) -> Result<()> {
    match process::tests_passed(&context.log) {
        0 => Err(Error::check("tests", "some that pass", "none")),
        _ => Ok(()),
    }
}

fn doc(context: &Context) -> Result<()> {
    context.logged(
        Command::new("cargo")
            .args(["doc", "--workspace", "--no-deps", "--features", ALL])
            .env("RUSTDOCFLAGS", "-D warnings"),
    )?;
    book::build(context.root, &crate::cache_dir()?, &super::command_for_tests()?, &context.log)?;
    packages(context)
}

/// What would be published, in the order of the crates' needs. The lanes before have compiled it.
fn packages(context: &Context) -> Result<()> {
    // Into a directory of its own, so that nothing there looks like a crate of the workspace.
    let target = context.root.join("target/lanes/packages");
    release::pack(&target, &["--allow-dirty"], |cargo| context.logged(cargo)).map(drop)
}

fn torch(context: &Context) -> Result<()> {
    let torch = |name: &&str| name.starts_with("torch::") || *name == "driftless::train";
    let names: Vec<_> = context.programs()?.names().filter(torch).collect();
    names.iter().try_for_each(|name| context.run(&mut context.program(name)?))?;
    // A program that was not found would otherwise be missed by nothing.
    some_ran(context)
}

fn with_sglang(context: &Context) -> Result<()> {
    let cache = crate::cache_dir()?;
    let work = context.root.join("target/lanes/sglang");
    let server = sglang::Conformance::start(&cache, &work, process::free_port()?)?;
    let model = smollm2::present(&cache);
    let run = |name: &str, only: &[&str]| -> Result<Command> {
        let mut program = context.program(name)?;
        program.args(only).arg("--nocapture");
        program.env("DRIFTLESS_TRANSFORMERS_PYTHON", sglang::python(&cache));
        program.env("DRIFTLESS_CHAT_TEMPLATES", python::chat_templates(&cache)?);
        program.envs(model.as_ref().map(|model| ("DRIFTLESS_REAL_CHECKPOINT", model)));
        Ok(program)
    };
    for name in ["bridge::sglang", "driftless::sglang", "bridge::rendezvous"] {
        context.run(server.tell(&mut run(name, &[])?))?;
    }
    // The bridge has SGLang's own unpickler read what it wrote, and torch release what it counts.
    context.some(server.tell(&mut run("bridge::lib", &["payload", "counters"])?))?;
    drop(server);
    ["torch::task", "torch::families", "trainer::chat", "torch::quantize"]
        .into_iter()
        .try_for_each(|name| context.run(&mut run(name, &[])?))
}

fn learner(context: &Context) -> Result<()> {
    let [one, ranks] = python::learners(context.root, &crate::cache_dir()?, &context.log)?;
    let run = |name: &str, learner: &python::Learner| {
        let mut tests = context.program(name)?;
        tests.args(["--nocapture", "of_the_environment"]).env("HF_HUB_OFFLINE", "1");
        tests.env("DRIFTLESS_LEARNER_COMMAND", &learner.command);
        context.some(tests.env("DRIFTLESS_LEARNER_CHECKPOINT", &learner.checkpoint))
    };
    run("trainer::learner", &one)?;
    run("driftless::learner", &one)?;
    run("driftless::learner", &ranks)
}

fn with_rewards(context: &Context) -> Result<()> {
    let python = rewards::python(&crate::cache_dir()?);
    let pairs = ["trainer/tests/math/pairs.py", "--check", "trainer/tests/math/pairs.jsonl"];
    context.logged(Command::new(&python).args(pairs))?;
    let mut hooks = context.program("trainer::hooks")?;
    context.some(hooks.args(["--nocapture", "reasoning_gym"]).env("DRIFTLESS_REWARDS_PYTHON", &python))?;
    context.some(context.program("observe::sinks")?.env("DRIFTLESS_REWARDS_PYTHON", &python))?;
    let mut clients = context.program("agent::gateway")?;
    context.some(clients.args(["--nocapture", "vendors_clients"]).env("DRIFTLESS_CLIENTS_PYTHON", python))?;
    let (python, templates) = rewards::families(&crate::cache_dir()?);
    let mut families = context.program("agent::sessions")?;
    families.args(["--nocapture", "oracle::"]).env("DRIFTLESS_FAMILIES_PYTHON", python);
    context.some(families.env("DRIFTLESS_FAMILIES_TEMPLATES", templates))?;
    if let Some(checkpoint) = smollm2::present(&crate::cache_dir()?) {
        let mut random = context.program("agent::sessions")?;
        random.args(["--nocapture", "random::"]).env("DRIFTLESS_TOKENIZERS", checkpoint);
        context.some(&mut random)?;
    }
    let (python, made_of) = rewards::verifiers(&crate::cache_dir()?);
    let mut played = context.program("trainer::hooked")?;
    played.args(["--nocapture", "environment::"]).env("DRIFTLESS_VERIFIERS_PYTHON", python);
    // Programs of its agents are made of what was installed.
    context.some(played.envs(made_of))?;
    let mut tools = context.program("trainer::hooked")?;
    let python = rewards::tools(&crate::cache_dir()?);
    context.some(tools.args(["--nocapture", "tools::"]).env("DRIFTLESS_TOOLS_PYTHON", &python))?;
    let mut tried = context.program("driftless::cli")?;
    tried.args(["--nocapture", "environment_is_tried", "package_mcp"]);
    context.some(tried.env("DRIFTLESS_TOOLS_PYTHON", python))?;
    let mut openenv = context.program("trainer::hooked")?;
    let python = rewards::openenv(&crate::cache_dir()?);
    context.some(openenv.args(["--nocapture", "openenv::"]).env("DRIFTLESS_OPENENV_PYTHON", python))
}

/// Steps of the demo, and behind which of them an engine is killed.
const DEMO_STEPS: usize = 12;
const DEMO_KILL: usize = 4;

fn demo(context: &Context) -> Result<()> {
    let cache = crate::cache_dir()?;
    let [dir, pictures] = ["target/lanes/demo", "target/lanes/page"].map(|path| context.root.join(path));
    [&dir, &pictures].into_iter().try_for_each(|dir| install::remove(dir))?;
    let (program, run) = (super::command_for_tests()?, dir.join("rl"));
    let mut demo = Command::new("cargo");
    demo.args(["xtask", "demo", "--smoke", "--dir"]).arg(&dir);
    demo.args(["--steps", &DEMO_STEPS.to_string(), "--kill-engine-behind", &DEMO_KILL.to_string()]);
    browser::watch(&cache, &program, &run, DEMO_KILL, &pictures, || context.logged(&mut demo))?;
    browser::look(&cache, &program, &run, &pictures, &context.log, browser::Use::Test)
}

fn with_stores(context: &Context) -> Result<()> {
    let servers = stores::Servers::start(&crate::cache_dir()?, &context.root.join("target/lanes/stores"))?;
    let mut program = context.program("store::servers")?;
    context.some(servers.tell(program.args(["--ignored", "--nocapture"])))
}

fn with_ucx(context: &Context) -> Result<()> {
    for (version, libraries) in ucx::releases(&crate::cache_dir()?) {
        // What else the command does, lane `unit` sees.
        let of_the_command = ["serving::", "a_host_follows_over_ucx"];
        for (name, only) in
            [("relay::fabric", &[][..]), ("relay::relay_ucx", &[]), ("driftless::cli", &of_the_command)]
        {
            let mut program = context.program(name)?;
            program.args(only).arg("--nocapture").env("DRIFTLESS_UCX_REQUIRED", version);
            context.some(program.env("LD_LIBRARY_PATH", &libraries))?;
        }
    }
    Ok(())
}

fn loom(context: &Context) -> Result<()> {
    context.some(
        Command::new("cargo")
            .current_dir(context.root)
            .args(["test", "-p", "driftless-buffer", "--lib", "interleavings"])
            .env("RUSTFLAGS", "--cfg loom -Clto=off")
            // Another cfg is another build of every dependency.
            .env("CARGO_TARGET_DIR", context.root.join("target/loom")),
    )
}

fn fuzz(context: &Context) -> Result<()> {
    let targets =
        process::output(Command::new("cargo").current_dir(context.root).args(["+nightly", "fuzz", "list"]))?;
    // The short form takes the same path every time: a finding there is a regression, not luck.
    let (limit, seed) = if context.options.long {
        ("-max_total_time=1800", "-seed=0")
    } else {
        ("-max_total_time=5", "-seed=1")
    };
    if targets.trim().is_empty() {
        return Err(Error::check("cargo fuzz list", "targets", "none"));
    }
    for target in targets.lines() {
        context.cargo(&["+nightly", "fuzz", "run", target, "--", limit, seed, "-max_len=16384"])?;
    }
    Ok(())
}

fn asan(context: &Context) -> Result<()> {
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    context.some(
        Command::new("cargo")
            .current_dir(context.root)
            .args(["+nightly", "test", "-p", "driftless-buffer", "--lib", "--target", &target])
            // Pages are simulated there, and Miri looks at them. They are half of the lane's time.
            .args(if context.options.long { &[][..] } else { &["--", "--skip", "tests::crash"] })
            .env("RUSTFLAGS", "-Zsanitizer=address -Clto=off")
            // The crash tests forget reservations on purpose, as a crash does.
            .env("ASAN_OPTIONS", "detect_leaks=0")
            .env("CARGO_TARGET_DIR", context.root.join("target/asan")),
    )
}

fn miri(context: &Context) -> Result<()> {
    let own = context.root.join("target/miri");
    let log = ["--lib", "--", "layout", "ledger", "wire", "cursor", "tests::crash"];
    let run = |miri: &mut Command| context.some(miri.current_dir(context.root).env("CARGO_TARGET_DIR", &own));
    run(foreign::miri("driftless-buffer").args(log))?;
    // All of the codec's `unsafe` is in `scan`; the payloads go through the rest.
    let codec = ["--lib", "--test", "golden", "--"];
    let scanned = if context.options.long { &[][..] } else { &["scan", "tiny"] };
    run(foreign::miri("driftless-delta").args(codec).args(scanned))
}

fn neon(context: &Context) -> Result<()> {
    let light = ["-p", "driftless-delta", "-p", "driftless-buffer", "-p", "driftless-bridge"];
    context.logged(foreign::arm("check").args(light).args(["-p", "driftless-transport"]))?;
    let tests = ["--lib", "--test", "golden", "--test", "stranger"];
    context.logged(foreign::arm("test").args(["-p", "driftless-delta"]).args(tests))
}

fn gpu(context: &Context) -> Result<()> {
    context.some(context.program("delta::cuda")?.env("DRIFTLESS_GPU_REQUIRED", "1").arg("--nocapture"))?;
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
