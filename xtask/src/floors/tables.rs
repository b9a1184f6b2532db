//! The tables of the house: crates and their rooms, from the ground up.

/// A crate that is built for users.
pub(super) struct House {
    pub(super) name: &'static str,
    /// Crates of ours that it may depend on.
    pub(super) below: &'static [&'static str],
    /// Lines of code that it may have: without tests, comments and blank lines.
    pub(super) lines_max: usize,
    /// Its rooms, from the ground up. A room may know those of its own floor and of the floors below. Rooms that
    /// know each other share a floor. Rooms are the files and folders directly below `src`.
    pub(super) floors: &'static [&'static [&'static str]],
}

/// Lines of code of most crates. A crate that would pass it becomes two.
const LINES_MAX: usize = 12_000;

/// Names that a crate's root may have, its public modules not counted.
pub(super) const ROOT_NAMES_MAX: usize = 20;

/// Members that may know all of them: the facade with the command, tools, measurements.
pub(super) const ABOVE_ALL: &[&str] =
    &["driftless", "driftless-python", "driftless-testkit", "driftless-compare", "xtask"];

/// All of them. Nothing points up.
pub(super) const HOUSES: &[House] = &[
    House {
        name: "driftless-delta",
        below: &[],
        lines_max: LINES_MAX,
        floors: &[
            &["digest", "element", "error", "scan"],
            &["bits", "pool", "source"],
            &["payload", "table"],
            &["classes", "coder", "entropy", "patch"],
            &["choose", "elements"],
            &["decode", "segment"],
            &["encode"],
            &["bundle", "cuda"],
        ],
    },
    House {
        name: "driftless-buffer",
        below: &[],
        lines_max: LINES_MAX,
        floors: &[
            &["clock", "locks", "position", "regular", "tests"],
            &["error", "options", "sample"],
            &["layout", "lock", "damage"],
            &["map"],
            &["scan", "storage"],
            &["segment", "durable_end", "ledger", "record", "wire"],
            &["index", "connection"],
            &["recover"],
            &["files", "shared", "spare", "sync"],
            &["cursor", "reservation", "reader"],
            &["retain", "check", "append", "query", "serve", "learned"],
            &["producer", "export"],
            &["log"],
        ],
    },
    House {
        name: "driftless-http",
        below: &[],
        lines_max: LINES_MAX,
        floors: &[
            &["error", "listen", "origin"],
            &["runtime", "server"],
            &["client", "metrics"],
            &["notify"],
        ],
    },
    House {
        name: "driftless-store",
        below: &["driftless-http"],
        lines_max: LINES_MAX,
        floors: &[
            &["digest", "error", "key", "os", "pool", "wait"],
            &["store"],
            &["disk", "download", "memory", "object", "probe", "wrap"],
            &["conformance", "open"],
        ],
    },
    House { name: "driftless-ucx-sys", below: &[], lines_max: LINES_MAX, floors: &[] },
    House {
        name: "driftless-transport",
        below: &["driftless-delta", "driftless-http", "driftless-store"],
        // Later rooms go elsewhere; ARCHITECTURE says where.
        lines_max: 11_200,
        floors: &[
            &["error", "ids", "sign"],
            &["dtype"],
            &["snapshot"],
            &["checkpoint"],
            &["manifest"],
            &["run", "tied"],
            &["chain", "prepared"],
            &["gc"],
            &["replica"],
            &["publish"],
            &["activate", "source", "foreign"],
            &["follow"],
        ],
    },
    House {
        name: "driftless-follower",
        below: &["driftless-http", "driftless-store", "driftless-transport"],
        lines_max: LINES_MAX,
        floors: &[],
    },
    House {
        name: "driftless-slime",
        below: &["driftless-store", "driftless-transport"],
        lines_max: LINES_MAX,
        floors: &[
            &["checksum", "json"],
            &["release"],
            &["frame", "identity"],
            &["feed"],
            &["plan", "publish"],
            &["follow"],
        ],
    },
    House {
        name: "driftless-relay",
        below: &["driftless-http", "driftless-store", "driftless-transport", "driftless-ucx-sys"],
        lines_max: LINES_MAX,
        floors: &[&["cache", "error", "recent"], &["fabric"], &["session"], &["relays", "serve"]],
    },
    House {
        name: "driftless-bridge",
        below: &["driftless-delta", "driftless-http", "driftless-store", "driftless-transport"],
        lines_max: LINES_MAX,
        floors: &[
            &["error"],
            &["keys", "nccl", "tls"],
            &["http"],
            &["events"],
            &["engine", "live"],
            &["sglang", "vllm"],
            &["kinds"],
            &["activate", "fleet"],
            &["coordinate", "push"],
        ],
    },
    House {
        name: "driftless-server",
        below: &["driftless-bridge", "driftless-http", "driftless-store"],
        lines_max: LINES_MAX,
        floors: &[],
    },
    House {
        name: "driftless-agent",
        below: &["driftless-bridge", "driftless-http", "driftless-store"],
        lines_max: LINES_MAX,
        floors: &[
            &["error", "json"],
            &["recent", "tools"],
            &["message"],
            &["chat", "journal", "tokenizer", "wire"],
            &["atif", "family", "gateway"],
            &["session"],
            &["sessions"],
        ],
    },
    House {
        name: "driftless-problems",
        below: &[],
        lines_max: LINES_MAX,
        floors: &[
            &["seed"],
            &["number"],
            &["math"],
            &[
                "arithmetic",
                "base_conversion",
                "chain_sum",
                "countdown",
                "gcd",
                "letter_counting",
                "number_sorting",
                "prime_factorization",
                "simple_equations",
            ],
        ],
    },
    House {
        name: "driftless-trainer",
        below: &[
            "driftless-agent",
            "driftless-delta",
            "driftless-buffer",
            "driftless-bridge",
            "driftless-http",
            "driftless-problems",
            "driftless-store",
            "driftless-transport",
        ],
        lines_max: LINES_MAX,
        floors: &[
            &["failure"],
            &["error", "lr", "seed"],
            &["door", "lines", "options", "push", "service"],
            &["advantage", "goodput", "ledger", "metrics", "sample", "schedule"],
            &["data", "events", "reward"],
            &["hook", "learner"],
            &["tasks"],
            &["rollout"],
            &["train"],
        ],
    },
    House {
        name: "driftless-evaluate",
        below: &["driftless-bridge", "driftless-store", "driftless-trainer", "driftless-transport"],
        lines_max: LINES_MAX,
        floors: &[&["in_use", "versions"]],
    },
    House {
        name: "driftless-verify",
        below: &["driftless-buffer"],
        lines_max: LINES_MAX,
        floors: &[&["digest", "ledger"], &["sample"]],
    },
    House {
        name: "driftless-observe",
        below: &["driftless-http", "driftless-trainer"],
        lines_max: LINES_MAX,
        floors: &[&["scalars"], &["prometheus", "tensorboard"], &["otlp"]],
    },
    House {
        name: "driftless-torch",
        below: &[
            "driftless-delta",
            "driftless-buffer",
            "driftless-http",
            "driftless-store",
            "driftless-transport",
            "driftless-bridge",
            "driftless-server",
            "driftless-trainer",
        ],
        lines_max: LINES_MAX,
        floors: &[
            &["error"],
            &["dispatcher"],
            &["libtorch"],
            &["config", "models", "ops"],
            &["batch", "quantize", "ranks"],
            &["apart", "head", "loss", "optimizer"],
            &["trained"],
            &["critic", "policy"],
            &["checkpoint", "learn", "snapshot"],
            &["engine", "lent", "tasks"],
            &["learner", "settings", "sft"],
        ],
    },
];
