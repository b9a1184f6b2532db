//! What differs between the SGLang versions that the engine can speak.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, input};

/// The SGLang version whose HTTP surface the engine shows.
///
/// The differences were read in the published wheels of these versions; `docs/wire/engine.md` lists them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Dialect {
    /// 0.5.12.post1: no `/ready`, no version spans, no update sessions.
    V0_5_12,
    /// 0.5.17: as 0.5.12, with per-engine checksums.
    V0_5_17,
    /// 0.5.23.
    #[default]
    V0_5_23,
}

impl Dialect {
    /// The version string in `/server_info`.
    #[must_use]
    pub fn version(self) -> &'static str {
        match self {
            Dialect::V0_5_12 => "0.5.12.post1",
            Dialect::V0_5_17 => "0.5.17",
            Dialect::V0_5_23 => "0.5.23",
        }
    }

    /// `/ready` (0.5.20), `/begin_weight_update` and `/end_weight_update` (0.5.21).
    pub(super) fn has_sessions(self) -> bool {
        self >= Dialect::V0_5_23
    }

    /// `meta_info.weight_versions` (0.5.19).
    pub(super) fn has_spans(self) -> bool {
        self >= Dialect::V0_5_23
    }

    /// Unknown sampling parameters are a 400 (0.5.22); before, they raised past the handler: a 500.
    pub(super) fn has_contract(self) -> bool {
        self >= Dialect::V0_5_23
    }

    /// A stop token in the last allowed place ends a request as `stop`; before, `length` came first.
    pub(super) fn stop_beats_length(self) -> bool {
        self >= Dialect::V0_5_23
    }

    /// While paused, requests that wait do not hinder a flush (0.5.21).
    pub(super) fn flush_ignores_waiting(self) -> bool {
        self >= Dialect::V0_5_23
    }

    /// A refused flush after an update is a 400 with the new weights in place (0.5.22); before, SGLang's
    /// scheduler failed an assertion and the server ended.
    pub(super) fn survives_refused_flush(self) -> bool {
        self >= Dialect::V0_5_23
    }

    /// `/weights_checker` sums up ranks, takes GET, and needs no body.
    pub(super) fn has_engine_checksum(self) -> bool {
        self >= Dialect::V0_5_17
    }

    /// `parallelism_info` is a list with roles; before, one object without.
    pub(super) fn has_roles(self) -> bool {
        self >= Dialect::V0_5_23
    }
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.version())
    }
}

impl FromStr for Dialect {
    type Err = Error;

    fn from_str(text: &str) -> Result<Dialect, Error> {
        match text {
            "0.5.12" | "0.5.12.post1" => Ok(Dialect::V0_5_12),
            "0.5.17" => Ok(Dialect::V0_5_17),
            "0.5.23" => Ok(Dialect::V0_5_23),
            other => Err(input("dialect", "0.5.12, 0.5.17 or 0.5.23", other)),
        }
    }
}
