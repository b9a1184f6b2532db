//! What differs between releases of SGLang.

use std::fmt;
use std::str::FromStr;

/// A release of SGLang 0.5, by what its clients can tell. Later ones are greater.
///
/// The differences were read in the published wheels of the releases that have a constant here;
/// `docs/wire/engine.md` lists them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Dialect(u32);

/// What releases came to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Feature {
    /// `/weights_checker` sums up ranks, takes GET, and needs no body.
    EngineChecksum,
    /// `load_format` in `/model_info`.
    ShownLoadFormat,
    /// `weight_versions` in replies: which output tokens came from which weights.
    Spans,
    /// `/ready`.
    Ready,
    /// `/begin_weight_update` and `/end_weight_update`.
    Sessions,
    /// A paused engine flushes while requests wait.
    FlushWhileRetracted,
    /// An update whose flush is refused is answered with 400; before, the server ended in an assertion.
    SurvivesRefusedFlush,
    /// Unknown sampling parameters are answered with 400; before, with 500.
    StrictSampling,
    /// A stop token in the last allowed place ends a request as `stop`; before, as `length`.
    StopBeatsLength,
    /// `parallelism_info` of `/weights_checker` is a list with roles; before, one object without.
    Roles,
}

impl Dialect {
    /// 0.5.12.post1.
    pub const V0_5_12: Self = Self(12);
    /// 0.5.17.
    pub const V0_5_17: Self = Self(17);
    /// 0.5.23.
    pub const V0_5_23: Self = Self(23);

    /// The dialect of a release as an engine names it, such as `0.5.12.post1`. A name without numbers is that
    /// of an old one.
    pub fn of_release(release: &str) -> Self {
        let mut parts = release.split(['.', '+', '-']).map(|part| part.parse::<u32>().unwrap_or(0));
        match [(); 3].map(|()| parts.next().unwrap_or(0)) {
            [0, 5, patch] => Self(patch),
            [0, 0..5, _] => Self(0),
            _ => Self(u32::MAX),
        }
    }

    /// Whether the release does this.
    pub fn has(self, feature: Feature) -> bool {
        let since = match feature {
            Feature::EngineChecksum => 17,
            Feature::ShownLoadFormat => 18,
            Feature::Spans => 19,
            Feature::Ready => 20,
            Feature::Sessions | Feature::FlushWhileRetracted => 21,
            Feature::SurvivesRefusedFlush | Feature::StrictSampling => 22,
            Feature::StopBeatsLength | Feature::Roles => 23,
        };
        self.0 >= since
    }
}

impl Default for Dialect {
    /// The newest that was read.
    fn default() -> Self {
        Self::V0_5_23
    }
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let post = if *self == Self::V0_5_12 { ".post1" } else { "" };
        write!(f, "0.5.{}{post}", self.0)
    }
}

impl FromStr for Dialect {
    type Err = String;

    /// The name of a release that has a constant.
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "0.5.12" | "0.5.12.post1" => Ok(Self::V0_5_12),
            "0.5.17" => Ok(Self::V0_5_17),
            "0.5.23" => Ok(Self::V0_5_23),
            other => Err(format!("expected 0.5.12, 0.5.17 or 0.5.23, found `{other}`")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_compare_by_number() {
        for (release, newer) in [
            ("0.5.22", true),
            ("0.5.23.post1", true),
            ("0.6.0", true),
            ("1.0.0", true),
            ("0.5.9", false),
            ("0.5.21", false),
            ("0.4.30", false),
            ("", false),
            ("main", false),
        ] {
            assert_eq!(Dialect::of_release(release).has(Feature::SurvivesRefusedFlush), newer, "{release:?}");
        }
    }

    #[test]
    fn names_of_known_releases_parse() {
        for dialect in [Dialect::V0_5_12, Dialect::V0_5_17, Dialect::V0_5_23] {
            assert_eq!(dialect.to_string().parse(), Ok(dialect));
        }
        assert_eq!("0.5.12".parse(), Ok(Dialect::V0_5_12));
        assert!("0.4.0".parse::<Dialect>().is_err());
    }
}
