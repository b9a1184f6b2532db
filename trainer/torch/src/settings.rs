//! What a run remembers of a learner of libtorch, to make another one like it.

use driftless_trainer::options::LearnOptions;
use driftless_trainer::{Error as LoopError, Result as LoopResult};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::learner::TorchOptions;
use crate::libtorch;

/// Settings of a [`TorchLearner`](crate::TorchLearner) that its weights follow from, beside those that the loop has.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Settings {
    /// [`TorchOptions::device`].
    pub device: String,
    /// [`TorchOptions::num_threads`]: libtorch adds up by threads.
    pub num_threads: usize,
    /// [`TorchOptions::fp8`].
    pub fp8: bool,
    /// Processes that train together.
    pub ranks: usize,
    /// Whether [`libtorch::set_deterministic`] was called.
    pub deterministic: bool,
}

impl Settings {
    /// Those of a learner in this process.
    pub(crate) fn of(options: &TorchOptions) -> Self {
        Settings {
            device: options.device.clone(),
            num_threads: options.num_threads,
            fp8: options.fp8,
            ranks: options.ranks.as_ref().map_or(1, |ranks| ranks.ranks),
            deterministic: libtorch::is_deterministic(),
        }
    }

    /// Reads what a run recorded.
    ///
    /// # Errors
    /// [`Error::Input`](driftless_trainer::Error::Input) for settings of another program, and for those whose weights do not come out
    /// the same again: of several ranks, and of a GPU that was not told to be deterministic.
    pub fn read(recorded: Option<&Value>) -> LoopResult<Self> {
        let refused = |expected: &str, found: String| {
            let (what, expected) = ("learner of the run".to_owned(), expected.to_owned());
            Err(LoopError::Input { what, expected, found })
        };
        let settings = match Settings::deserialize(recorded.unwrap_or(&Value::Null)) {
            Ok(settings) => settings,
            Err(error) => return refused("libtorch in the process of the loop", error.to_string()),
        };
        match settings.ranks {
            1 if settings.device == "cpu" || settings.deterministic => Ok(settings),
            1 => refused("cpu, or a GPU with `deterministic`: another adds up in any order", settings.device),
            ranks => refused("one process, as several are not replayed", format!("{ranks} ranks")),
        }
    }

    /// The options of a learner with these settings.
    #[must_use]
    pub fn options(&self, learn: LearnOptions, temperature: f64) -> TorchOptions {
        let options = TorchOptions::new(learn).with_temperature(temperature);
        options.with_num_threads(self.num_threads).with_device(self.device.as_str()).with_fp8(self.fp8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn settings_are_read_back_and_refused_where_bits_may_differ() {
        let options = TorchOptions::new(LearnOptions::default()).with_num_threads(3);
        let settings = Settings::of(&options);
        let recorded = serde_json::to_value(&settings).unwrap();
        let read = Settings::read(Some(&recorded)).unwrap();
        assert_eq!(read, settings);
        assert_eq!(read.options(LearnOptions::default(), 1.0).num_threads, 3);
        let with = |name: &str, value: Value| {
            let mut recorded = recorded.clone();
            recorded[name] = value;
            recorded
        };
        let gpu = |deterministic: bool| {
            let mut recorded = with("device", json!("cuda:0"));
            recorded["deterministic"] = json!(deterministic);
            recorded
        };
        assert!(Settings::read(Some(&gpu(true))).is_ok());
        for (recorded, word) in [
            (gpu(false), "found cuda:0"),
            (with("ranks", json!(2)), "found 2 ranks"),
            (json!({"command": "python"}), "libtorch in the process of the loop"),
        ] {
            let refused = Settings::read(Some(&recorded)).unwrap_err().to_string();
            assert!(refused.contains(word), "{refused}");
        }
    }
}
