//! What a subcommand can end with, and the exit code of each.

use std::borrow::Cow;
use std::path::PathBuf;

pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Delta(#[from] driftless::delta::Error),
    #[error(transparent)]
    Transport(#[from] driftless::transport::Error),
    #[error(transparent)]
    Http(#[from] driftless::http::Error),
    #[error(transparent)]
    Relay(#[from] driftless::relay::Error),
    #[error(transparent)]
    Buffer(#[from] driftless::buffer::Error),
    #[error(transparent)]
    Bridge(#[from] driftless::bridge::Error),
    #[error(transparent)]
    Agent(#[from] driftless::agent::Error),
    #[error(transparent)]
    Trainer(driftless::trainer::Error),
    #[cfg(feature = "torch")]
    #[error(transparent)]
    Torch(driftless::torch::Error),
    /// A file or a directory cannot be read or written. The cause stands below it.
    #[error("{}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    /// A file or an answer is damaged, or is of another program. The cause names the place in it.
    #[error("{what} is not valid JSON")]
    Json { what: String, source: serde_json::Error },
    /// A flag, or what a file says, is not what it has to be. Nothing was done; `--help` says what a flag takes.
    #[error("{what}: expected {expected}, found {found}")]
    Usage { what: String, expected: String, found: String },
    /// Standard output is full or closed. What the command did is done, and stays.
    #[error("results cannot be written to standard output")]
    Output(#[source] std::io::Error),
    /// A signal ended the command. Give the same command again.
    #[error("{what} was interrupted by {}; the same command goes on from what is stored", signal_name(*signal))]
    Interrupted { what: Cow<'static, str>, signal: i32 },
    /// What a check looked at is damaged. The lines before name each part.
    #[error("{what}: {damaged} damaged, see above")]
    Damaged { what: String, damaged: u64 },
    /// Engines do not generate: the command ended between their pause and their going on.
    #[error(
        "paused, or inside an activation: {engines}; start `driftless follow` again, or load weights that are known and POST /continue_generation"
    )]
    LeftPaused { engines: String, source: Option<Box<Error>> },
    /// `doctor` found what keeps a run from working. Each problem has what to do beside it.
    #[error("{problems} problem{} found, see above", if *problems == 1 { "" } else { "s" })]
    Unfit { problems: usize },
}

/// A setting that a library refuses is a flag here.
impl From<driftless::trainer::Error> for Error {
    fn from(error: driftless::trainer::Error) -> Error {
        match error {
            driftless::trainer::Error::Input { what, expected, found } if flag(&what).is_some() => {
                Error::Usage { what: flag(&what).unwrap_or(what), expected, found }
            }
            driftless::trainer::Error::Resume { path, what, expected, found } => {
                let what = flag(&what).unwrap_or(what);
                Error::Trainer(driftless::trainer::Error::Resume { path, what, expected, found })
            }
            error => Error::Trainer(error),
        }
    }
}

#[cfg(feature = "torch")]
impl From<driftless::torch::Error> for Error {
    fn from(error: driftless::torch::Error) -> Error {
        match error {
            driftless::torch::Error::Input { what, expected, found } if flag(what).is_some() => {
                Error::Usage { what: flag(what).unwrap_or_default(), expected, found }
            }
            error => Error::Torch(error),
        }
    }
}

impl Error {
    pub(crate) fn usage(what: impl Into<String>, expected: impl Into<String>, found: impl ToString) -> Error {
        Error::Usage { what: what.into(), expected: expected.into(), found: found.to_string() }
    }

    /// As `--help` documents.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Error::Usage { .. } => 2,
            Error::Damaged { .. } | Error::Delta(_) => 3,
            Error::LeftPaused { .. } => 5,
            // As a shell says it of a program that the signal has ended.
            Error::Interrupted { signal, .. } => {
                128u8.saturating_add(u8::try_from(*signal).unwrap_or_default())
            }
            error if error.is_closed_pipe() => 128 + 13,
            Error::Buffer(error) => buffer_code(error),
            Error::Transport(error) => transport_code(error),
            Error::Http(error) => http_code(error),
            Error::Relay(error) => relay_code(error),
            Error::Bridge(error) => bridge_code(error),
            Error::Agent(error) => agent_code(error),
            Error::Trainer(error) => trainer_code(error),
            #[cfg(feature = "torch")]
            Error::Torch(error) => torch_code(error),
            _ => 1,
        }
    }

    /// What helps, where another command or option does.
    pub(crate) fn hint(&self) -> Option<String> {
        match self {
            Error::Transport(error) => transport_hint(error),
            Error::Relay(driftless::relay::Error::Transport(error)) => transport_hint(error),
            Error::Relay(driftless::relay::Error::Http(error))
            | Error::Agent(driftless::agent::Error::Http(error))
            | Error::Http(error) => http_hint(error),
            Error::Trainer(error) => trainer_hint(error).or_else(|| flags_hint(self)),
            #[cfg(feature = "torch")]
            Error::Torch(_) => flags_hint(self),
            _ => None,
        }
    }

    /// Whether the reader of the results has gone, which is no failure and nothing to talk about.
    pub(crate) fn is_closed_pipe(&self) -> bool {
        matches!(self, Error::Output(source) if source.kind() == std::io::ErrorKind::BrokenPipe)
    }
}

/// A refusal of what a build without libtorch does not have; `or` is what else would do.
#[cfg(not(feature = "torch"))]
pub(crate) fn absent(what: &str, or: &str) -> Error {
    let build =
        "a build with libtorch: `cargo install --locked --path . --features torch`, see docs/operations.md";
    Error::usage(what, format!("{or}{build}"), "one without the feature torch")
}

/// The flags that stand for settings of the crates below.
const FLAGS: [(&str, &str); 23] = [
    ("ChildOptions::deadline", "--learner-deadline"),
    ("HookOptions::deadline", "--hook-deadline"),
    ("RankOptions::ranks", "--actor-num-gpus-per-node"),
    ("anchor_every", "--anchor-every"),
    ("anchor_share", "--anchor-share"),
    ("baseline_dir", "--baseline-dir"),
    ("checkpoint directory", "--checkpoint-dir, or --output"),
    ("connections", "--connections"),
    ("dashboard address", "--listen, with --token-file"),
    ("engines_in_use", "--engines-in-use"),
    ("follower address", "--listen, with --token-file"),
    ("gateway address", "--listen, with --token-file"),
    ("gateway's metrics address", "--metrics-listen, with --token-file"),
    ("keep", "--keep"),
    ("plugin_dir", "--plugin-dir"),
    ("push", "--update-weight-transport, --colocate"),
    ("rank", "--rank"),
    ("ranks", "--ranks"),
    ("relay address", "--listen, with --token-file"),
    ("sign key", "--sign-key"),
    ("to", "--to"),
    ("trust key", "--trust-key"),
    ("versions", "--versions"),
];

/// The flag of `train` that stands for a setting of the loop or its learner.
pub(crate) fn flag(setting: &str) -> Option<String> {
    let named = FLAGS.iter().find(|(known, _)| *known == setting).map(|(_, flag)| (*flag).to_owned());
    named.or_else(|| {
        let train = crate::cli::command().find_subcommand("train")?.clone();
        let of_setting = train.get_arguments().find(|argument| argument.get_id() == setting)?;
        Some(format!("--{}", of_setting.get_long()?))
    })
}

/// The flags that stand for the settings that an error names: in backticks.
fn flags_hint(error: &Error) -> Option<String> {
    let mut flags = std::collections::BTreeSet::new();
    let mut cause: Option<&dyn std::error::Error> = Some(error);
    while let Some(error) = cause {
        flags.extend(error.to_string().split('`').skip(1).step_by(2).filter_map(flag));
        cause = error.source();
    }
    let flags: Vec<_> = flags.into_iter().collect();
    (!flags.is_empty()).then(|| format!("see {}", flags.join(", ")))
}

/// Variables of which one holds the credentials of the stores of a scheme.
const CREDENTIALS: [(&str, &[&str]); 3] = [
    ("s3://", &["AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"]),
    ("gs://", &["GOOGLE_SERVICE_ACCOUNT", "GOOGLE_APPLICATION_CREDENTIALS"]),
    ("az://", &["AZURE_STORAGE_ACCOUNT_KEY", "AZURE_CLIENT_ID"]),
];

fn transport_hint(error: &driftless::transport::Error) -> Option<String> {
    use driftless::store::Error as Store;
    use driftless::transport::Error as Transport;
    match error {
        Transport::NoSuchRun { .. } => Some(
            "`driftless inspect --store URL` lists the runs of a store, `driftless publish --new-run` begins one"
                .to_owned(),
        ),
        Transport::LayoutChanged { .. } => Some("see --allow-layout-change".to_owned()),
        Transport::NotFinite { .. } => Some("see --allow-non-finite".to_owned()),
        Transport::RunExists { .. } => Some("--resume or --resume-or-new goes on with it, --run NAME names another".to_owned()),
        Transport::BadSetting { name, .. } | Transport::Store(Store::BadSetting { name, .. }) => {
            flag_hint(name)
        }
        Transport::Store(Store::Refused { store, .. } | Store::Unreachable { store, .. }) => {
            let (_, variables) = CREDENTIALS.iter().find(|(scheme, _)| store.starts_with(scheme))?;
            let found = variables.iter().any(|variable| std::env::var_os(variable).is_some());
            let missing = || format!("no credentials were found: set {}", variables.join(" or "));
            (!found).then(missing)
        }
        _ => None,
    }
}

fn trainer_hint(error: &driftless::trainer::Error) -> Option<String> {
    use driftless::trainer::Error as Trainer;
    use driftless::transport::Error as Transport;
    match error {
        Trainer::Transport(Transport::RunExists { .. }) => {
            Some("--run NAME names another; that run goes on from its own --save directory only".to_owned())
        }
        Trainer::NotFollowed { run, store, .. } => Some(format!(
            "beside each engine: driftless follow --store {store} --run {run} --checkpoint-dir DIR --hf-checkpoint DIR \
             --engine URL"
        )),
        Trainer::NoHalf { what: "rollouts", .. } => {
            Some("on this host, with the same flags: driftless rollout --save DIR".to_owned())
        }
        Trainer::NoHalf { .. } => {
            Some("on this host, with the same flags: driftless train --rollouts DIR".to_owned())
        }
        Trainer::Transport(error) => transport_hint(error),
        Trainer::Differs { step, .. } => {
            Some(format!("`driftless log show RUN --step {step}` prints what it learned from"))
        }
        _ => None,
    }
}

fn http_hint(error: &driftless::http::Error) -> Option<String> {
    let driftless::http::Error::BadSetting { name, .. } = error else { return None };
    flag_hint(name)
}

/// The flag that stands for a setting.
fn flag_hint(setting: &str) -> Option<String> {
    let flag = FLAGS.iter().find(|(name, _)| *name == setting).map(|(_, flag)| flag);
    flag.map(|flag| format!("see {flag}"))
}

pub(crate) fn signal_name(signal: i32) -> &'static str {
    match signal {
        1 => "SIGHUP",
        2 => "SIGINT",
        _ => "SIGTERM",
    }
}

/// The command's exit code for an error of the log: 3 where it was refused, else 1.
#[must_use]
pub fn buffer_code(error: &driftless::buffer::Error) -> u8 {
    use driftless::buffer::Error as Buffer;
    match error {
        Buffer::Damaged { .. } | Buffer::Identity { .. } => 3,
        _ => 1,
    }
}

/// The command's exit code for an error of a publication: 2 where a setting or a name cannot be meant, 3 where
/// what is stored was refused, 4 where somebody did not answer, else 1.
#[must_use]
pub fn transport_code(error: &driftless::transport::Error) -> u8 {
    use driftless::store::Error as Store;
    use driftless::transport::Error as Transport;
    match error {
        // Tensors have the names that a checkpoint gives them.
        Transport::BadName { what: "tensor", .. } => 1,
        Transport::BadName { .. }
        | Transport::BadSetting { .. }
        | Transport::BadText { .. }
        | Transport::Store(Store::BadSetting { .. } | Store::BadText { .. }) => 2,
        Transport::Corrupt { .. }
        | Transport::Parse { .. }
        | Transport::ForeignRun { .. }
        | Transport::ForeignModel { .. }
        | Transport::BrokenChain { .. }
        | Transport::Unsigned { .. }
        | Transport::BadSignature { .. }
        | Transport::DamagedReplica { .. }
        | Transport::Store(Store::DigestMismatch { .. } | Store::WrongSize { .. } | Store::NotAFile { .. })
        | Transport::Codec { .. } => 3,
        Transport::PartsMissing { .. }
        | Transport::NotJoined { .. }
        | Transport::Store(Store::Unreachable { .. })
        | Transport::EngineTimeout { .. } => 4,
        _ => 1,
    }
}

/// 2 where a URL or an address cannot be meant, 4 where a server did not answer, else 1.
fn http_code(error: &driftless::http::Error) -> u8 {
    use driftless::http::Error as Http;
    match error {
        Http::BadUrl { .. } | Http::BadSetting { .. } => 2,
        Http::NoAnswer { .. } | Http::Lost(_) => 4,
        _ => 1,
    }
}

/// Whether a relay did not answer, or one of the others' reasons.
fn relay_code(error: &driftless::relay::Error) -> u8 {
    use driftless::relay::Error as Relay;
    match error {
        Relay::Transport(error) => transport_code(error),
        Relay::Http(error) => http_code(error),
        Relay::LinkTimeout { .. } => 4,
        _ => 1,
    }
}

/// The command's exit code for an error of an engine: 2 for an address that is none, 4 where it was slow or
/// away, else 1.
#[must_use]
pub fn bridge_code(error: &driftless::bridge::Error) -> u8 {
    use driftless::bridge::Error as Bridge;
    match error {
        Bridge::Address { .. } | Bridge::Ca { .. } => 2,
        Bridge::Deadline { .. }
        | Bridge::GivenUp { .. }
        | Bridge::Behind { .. }
        | Bridge::Unattached { .. }
        | Bridge::Exhausted { .. }
        | Bridge::Group { .. }
        | Bridge::Unreachable { .. } => 4,
        _ => 1,
    }
}

/// 3 where a file of a checkpoint was refused, or a server's reason.
fn agent_code(error: &driftless::agent::Error) -> u8 {
    use driftless::agent::Error as Agent;
    match error {
        Agent::Json { .. } => 3,
        Agent::Http(error) => http_code(error),
        _ => 1,
    }
}

/// Whether an option, or a file that it names, was not what it has to be.
fn trainer_code(error: &driftless::trainer::Error) -> u8 {
    use driftless::trainer::Error as Trainer;
    match error {
        Trainer::Buffer(error) => buffer_code(error),
        Trainer::Bridge(error) => bridge_code(error),
        Trainer::Transport(error) => transport_code(error),
        Trainer::Input { .. } => 2,
        Trainer::NotFollowed { source, .. } => bridge_code(source),
        Trainer::Json { .. }
        | Trainer::OtherRun { .. }
        | Trainer::LearnerAhead { .. }
        | Trainer::Resume { .. } => 3,
        Trainer::LearnerLost { .. }
        | Trainer::LearnerStillRuns { .. }
        | Trainer::NoHalf { .. }
        | Trainer::NoRun { .. } => 4,
        Trainer::NoRunAt { source, .. }
        | Trainer::FleetListen { source }
        | Trainer::MetricsListen { source } => http_code(source),
        #[cfg(feature = "torch")]
        Trainer::Learner { source, .. } => source.downcast_ref().map_or(1, torch_code),
        _ => 1,
    }
}

/// Whether a checkpoint or the state of a run was refused, or one of the others' reasons.
#[cfg(feature = "torch")]
fn torch_code(error: &driftless::torch::Error) -> u8 {
    use driftless::torch::Error as Torch;
    match error {
        Torch::Loop(error) => trainer_code(error),
        Torch::Transport(error) => transport_code(error),
        Torch::Http(error) => http_code(error),
        Torch::Json { .. } | Torch::Tensor { .. } | Torch::Resume { .. } => 3,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use driftless::buffer::Error as Buffer;
    use driftless::store::Error as Store;
    use driftless::store::Key;
    use driftless::transport::Error as Transport;
    use std::time::Duration;

    #[test]
    fn exit_codes_are_those_of_the_help() {
        let log = PathBuf::from("log");
        let damaged = Buffer::Damaged { path: log.clone(), offset: 7, what: "frame header" };
        assert_eq!(Error::Buffer(damaged).exit_code(), 3);
        let locked = Buffer::Locked { path: log, holder: None };
        assert_eq!(Error::Buffer(locked).exit_code(), 1);
        let key = Key::new("run/manifest").expect("a key");
        let waited = Duration::from_secs(120);
        let store = "s3://bucket".to_owned();
        let (action, source) = ("get", "no answer".into());
        let silent = Transport::from(Store::Unreachable { store, action, key, waited, attempts: 9, source });
        assert_eq!(Error::Transport(silent).exit_code(), 4);
        let odd = Transport::from(Store::NotAFile { path: PathBuf::from("head"), found: "a FIFO" });
        assert_eq!(Error::Transport(odd).exit_code(), 3);
        let peer = "host:1".to_owned();
        let link = driftless::relay::Error::LinkTimeout { peer, action: "hear from", waited };
        assert_eq!(Error::Relay(link).exit_code(), 4);
        let (what, expected, found) = ("--store".to_owned(), "a URL".to_owned(), "none".to_owned());
        assert_eq!(Error::Usage { what, expected, found }.exit_code(), 2);
        assert_eq!(Error::LeftPaused { engines: "http://e:1".to_owned(), source: None }.exit_code(), 5);
    }
}
