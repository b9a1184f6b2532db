//! What several subcommands need.
//!
//! | File | Is |
//! |---|---|
//! | `error`, `output`, `progress`, `logs` | how a command ends, prints, shows that it goes on, and logs |
//! | `paths`, `numbers`, `keys` | what flags name, checked before anything is made |
//! | `run`, `store`, `slime`, `transport`, `engines` | flags that commands share: runs, stores, slime's layout, ways of weights, which engines are taken and how they came by a version |
//! | `timeline`, `alerts` | what the files of a run say: when everything happened, and what to do about an alert |
//! | `scratch` | directories that go with a command |
//! | `signals`, `mapped`, `failpoints` | the process: its end, unreadable pages, crash points |

pub(crate) mod alerts;
pub(crate) mod engines;
pub(crate) mod error;
#[cfg(feature = "failpoints")]
pub(crate) mod failpoints;
pub(crate) mod keys;
pub(crate) mod logs;
pub(crate) mod mapped;
pub(crate) mod numbers;
pub(crate) mod output;
pub(crate) mod paths;
pub(crate) mod progress;
pub(crate) mod run;
pub(crate) mod scratch;
pub(crate) mod signals;
pub(crate) mod slime;
pub(crate) mod store;
pub(crate) mod timeline;
pub(crate) mod transport;
