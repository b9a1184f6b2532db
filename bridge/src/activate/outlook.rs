//! What engines are going to get of a run's versions, told before there is one for them.

use std::fmt;

use driftless_http::runtime;
use driftless_store::chain_text;
use driftless_transport::activate::How;
use serde::Serialize;

use super::{Compare, DiskOptions, attach_anew, check_directory, plugin};
use crate::engine::config::FP8_BLOCKS;
use crate::engine::{Attached, Expected, Identity, ModelConfig};
use crate::error::{Error, Result};
use crate::kinds::connect;

/// What has an engine patched, and its weights compared.
const INSTALL: &str = "install driftless-rl into its environment";

/// What an engine is going to get.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outlook {
    /// Versions.
    Taken {
        /// How it comes by them, unless one of them cannot be patched.
        how: How,
        /// Whether its live weights are compared with each version that it loads.
        compared: Foreseen,
    },
    /// None.
    Refused {
        /// Why, and what to do.
        why: String,
    },
}

/// Whether live weights are going to be compared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Foreseen {
    /// By this.
    By(&'static str),
    /// Not.
    Not {
        /// Why.
        why: String,
    },
}

impl fmt::Display for Outlook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (how, compared) = match self {
            Self::Refused { why } => return write!(f, "refused: {why}"),
            Self::Taken { how, compared } => (how, compared),
        };
        f.write_str(match how {
            How::Patched => "patched",
            How::Loaded { .. } => "loaded",
            How::Pushed => "pushed",
        })?;
        match compared {
            Foreseen::By(by) => write!(f, " and compared by {by}")?,
            Foreseen::Not { why } => write!(f, ", not compared ({why})")?,
        }
        match how {
            How::Loaded { why: Some(why) } => write!(f, "; not patched: {why}; {INSTALL}"),
            _ => Ok(()),
        }
    }
}

/// What the engine at an address of [`connect`] gets of a model's versions from a [`DiskActivator`](super::DiskActivator)
/// of these options, as it and its plugin say. It is asked who it is; nothing changes there, and nothing is generated.
///
/// # Errors
/// [`Error::Address`] and [`Error::SetUp`], as for the activator. An engine that does not answer is refused.
pub fn outlook(address: &str, expected: &Expected, options: &DiskOptions) -> Result<Outlook> {
    let runtime = runtime::handle().map_err(Error::threads)?;
    let engine = connect(address, options.client.clone())?;
    let asked = {
        let (engine, base) = (engine.clone(), options.base.as_deref());
        runtime::wait(&runtime, async move { attach_anew(engine, base, expected).await })
    };
    let directory = options.engine_checkpoint_dir.as_deref();
    let admitted = asked.and_then(|identity| {
        directory.map_or(Ok(()), |directory| check_directory(engine.url(), &identity, directory))?;
        Ok(identity)
    });
    Ok(match admitted {
        Ok(identity) => outlook_of(&Attached::new(engine, identity), options),
        Err(error) => Outlook::Refused { why: chain_text(&error) },
    })
}

/// The same of an engine that was accepted already. Only its plugin is looked for.
pub fn outlook_of(attached: &Attached, options: &DiskOptions) -> Outlook {
    let (engine, identity) = (attached.engine(), attached.identity());
    of(engine.url(), identity, options, |options| {
        (plugin::patches(engine, identity.tp, options), plugin::compares(engine, identity.tp, options))
    })
}

/// What `plugin` says of patching and of comparing, put together.
fn of(
    engine: &str,
    identity: &Identity,
    options: &DiskOptions,
    plugin: impl FnOnce(&super::PluginOptions) -> (Result<(), plugin::Unready>, Result<(), plugin::Unready>),
) -> Outlook {
    let (patches, compares) = match &options.plugin {
        None => (Ok(None), Err("plugins are not used".to_owned())),
        Some(options) => {
            let (patches, compares) = plugin(options);
            let why = |unready: plugin::Unready| unready.why().to_owned();
            (patches.map(Some).map_err(why), compares.map_err(why))
        }
    };
    let required = options.plugin.as_ref().is_some_and(|plugin| plugin.required);
    let how = match patches {
        Ok(Some(())) => How::Patched,
        Ok(None) => How::Loaded { why: None },
        Err(why) if required => {
            let error = Error::NoPlugin { engine: engine.into(), why };
            return Outlook::Refused { why: error.to_string() };
        }
        Err(why) => How::Loaded { why: Some(why) },
    };
    let compared = match (compares, &identity.no_checksums) {
        (Ok(()), _) => Foreseen::By("its plugin"),
        (Err(_), None) => Foreseen::By("its checksums"),
        (Err(plugin), Some(checksums)) => Foreseen::Not { why: format!("{plugin}; {checksums}") },
    };
    match (compared, options.compare) {
        (Foreseen::Not { why }, Compare::Require) => {
            let error = Error::NotComparable { engine: engine.into(), why };
            Outlook::Refused { why: error.to_string() }
        }
        (compared, _) => Outlook::Taken { how, compared },
    }
}

/// What any engine can get of a model's versions, as its `config.json` alone says.
pub fn forecast(config: &ModelConfig) -> String {
    if let Some(found) = config.quantization.as_deref().filter(|found| *found != FP8_BLOCKS) {
        return format!(
            "engines: refused, since they are updated in {FP8_BLOCKS} or not quantised, and this is {found}"
        );
    }
    let else_loaded = match (config.fusing(), &config.quantization) {
        (Err(why), _) => format!("loaded, not compared ({why})"),
        (Ok(_), Some(_)) => "loaded, not compared (checksums of quantised weights are not known)".to_owned(),
        (Ok(_), None) => "loaded, and compared by checksums for one rank on a CPU".to_owned(),
    };
    let own = if config.custom_code { "; the checkpoint brings model code of its own" } else { "" };
    format!(
        "engines: patched and compared where driftless-rl is in their environment, otherwise {else_loaded}{own}"
    )
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::PluginOptions;
    use super::super::plugin::Unready;
    use super::*;

    fn identity(no_checksums: Option<&str>) -> Identity {
        Identity { no_checksums: no_checksums.map(str::to_owned), ..Identity::made_up() }
    }

    #[test]
    fn outlook_tells_the_four_outcomes_and_why() {
        let plugin = Some(PluginOptions::new("/plugins"));
        let options = |compare| DiskOptions { plugin: plugin.clone(), compare, ..DiskOptions::default() };
        let without = || Err(Unready::Without("no file".into()));
        let of = |sums: Option<&str>, compare, patches: fn() -> Result<(), Unready>| {
            of("e", &identity(sums), &options(compare), |_| (patches(), patches())).to_string()
        };
        assert_eq!(of(Some("odd"), Compare::Require, || Ok(())), "patched and compared by its plugin");
        let loaded = of(None, Compare::Require, without);
        assert!(loaded.starts_with("loaded and compared by its checksums; not patched: no file"), "{loaded}");
        let not = of(Some("odd"), Compare::Auto, without);
        assert!(not.starts_with("loaded, not compared (no file; odd)") && not.contains("install"), "{not}");
        let refused = of(Some("odd"), Compare::Require, without);
        assert!(refused.starts_with("refused: ") && refused.contains("no file; odd"), "{refused}");
    }

    #[test]
    fn forecast_says_what_is_known_of_the_family() {
        let of = |more: &str| {
            let config = format!(r#"{{"architectures":["OddForCausalLM"],"dtype":"bfloat16"{more}}}"#);
            forecast(&ModelConfig::parse(Path::new("c"), config.as_bytes()).unwrap())
        };
        assert!(of("").ends_with("loaded, not compared (the fusing of OddForCausalLM is not known here)"));
        assert!(of(r#","auto_map":{"AutoModel":"x.Y"}"#).ends_with("model code of its own"));
        let refused = of(r#","quantization_config":{"quant_method":"awq"}"#);
        assert!(refused.starts_with("engines: refused") && refused.ends_with("awq"), "{refused}");
    }
}
