//! vLLM as an [`Engine`].
//!
//! vLLM loads the directory that it was started with, so that is the one which a follower overwrites. The
//! label is the server's own weight version, which driftless sets: it ends with the process, as the weights
//! do.
//!
//! A server with our plugin is told what it has loaded. It then prepares what a follower offers, and is
//! patched.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use driftless_transport::Dtype;
use driftless_transport::activate::Limit;

use super::Client;
use crate::engine::{
    About, Answer, Check, Comparison, Engine, Expected, GenerateRequest, Generation, Identity, Patched,
    PauseMode, Reload, Rid, Tell, expect_label, local,
};
use crate::error::{Error, Result};

/// The calls without which a server cannot be updated, and what a GET of each answers: 405 where it is a POST.
const CALLS: [(&str, u16); 7] = [
    ("/pause", 405),
    ("/resume", 405),
    ("/collective_rpc", 405),
    ("/reset_prefix_cache", 405),
    ("/update_weight_version", 405),
    ("/weight_info", 200),
    ("/is_paused", 200),
];

impl Engine for Client {
    fn kind(&self) -> &'static str {
        "vllm"
    }

    fn url(&self) -> &str {
        &self.connection.engine
    }

    fn limited(&self, limit: &Limit) -> Arc<dyn Engine> {
        Arc::new(Self { connection: self.connection.limited(limit), ..self.clone() })
    }

    fn about(&self) -> Answer<'_, About> {
        Box::pin(async { Ok(About { release: Some(self.version().await?), model: self.root().await? }) })
    }

    fn identify<'a>(&'a self, expected: &'a Expected) -> Answer<'a, Identity> {
        Box::pin(identify(self, expected))
    }

    fn label(&self) -> Answer<'_, Option<String>> {
        Box::pin(self.weight_info())
    }

    fn set_label<'a>(&'a self, label: &'a str) -> Answer<'a, ()> {
        Box::pin(self.update_weight_version(label))
    }

    fn generate<'a>(&'a self, request: &'a GenerateRequest) -> Answer<'a, Generation> {
        Box::pin(self.completion(request))
    }

    fn stream<'a>(
        &'a self,
        request: &'a GenerateRequest,
        interval: u32,
        seen: Tell<'a>,
    ) -> Answer<'a, Generation> {
        Box::pin(Client::stream(self, request, interval, seen))
    }

    /// Nothing to send: vLLM aborts a request when its client hangs up, as whoever gives one up has done.
    fn abort<'a>(&'a self, _request: &'a Rid) -> Answer<'a, ()> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn pause(&self, mode: PauseMode) -> Answer<'_, ()> {
        let path = if mode == PauseMode::Abort { "/pause?mode=abort" } else { "/pause?mode=keep" };
        Box::pin(self.says(path, "paused"))
    }

    fn resume(&self) -> Answer<'_, ()> {
        Box::pin(self.says("/resume", "resumed"))
    }

    fn ready(&self) -> Answer<'_, Option<bool>> {
        Box::pin(async { Ok(Some(!self.is_paused().await?)) })
    }

    fn empty_cache(&self, mode: PauseMode) -> Answer<'_, ()> {
        Box::pin(empty_cache(self, mode))
    }

    fn load<'a>(&'a self, load: Reload<'a>) -> Answer<'a, ()> {
        Box::pin(async move {
            self.reload_weights().await?;
            self.tell_plugin(load.label).await
        })
    }

    fn patch<'a>(&'a self, load: Reload<'a>) -> Answer<'a, Patched> {
        Box::pin(patch(self, load))
    }

    fn compare<'a>(&'a self, load: Reload<'a>, sample: Option<u64>) -> Answer<'a, Comparison> {
        Box::pin(Client::compare(self, load.label, load.directory, sample))
    }
}

async fn identify(client: &Client, expected: &Expected) -> Result<Identity> {
    // It may be another process than the one that was asked before.
    client.without_plugin.store(false, Ordering::Relaxed);
    for (path, status) in CALLS {
        if !client.has(path, status).await? {
            return Err(client.lacks(path));
        }
    }
    let (version, root) = (client.version().await?, client.root().await?);
    let local = local(Path::new(&root), None)?;
    let identity = compare(client.url(), expected, local.as_ref())?;
    Ok(Identity { version: Some(version), loads_only: Some(PathBuf::from(root)), ..identity })
}

/// Compares the config under the server's model path, where that can be read here, with what is expected.
fn compare(engine: &str, expected: &Expected, local: Option<&Expected>) -> Result<Identity> {
    let check = Check { engine };
    if let Some(local) = local {
        check.equal("torch_dtype", expected.config.dtype.name(), local.config.dtype.name())?;
        check.config(expected, local)?;
    }
    check.quantization(expected, &["none"])?;
    // A float32 model is loaded as float16 unless --dtype says otherwise, and no call says what it said.
    if expected.config.dtype == Dtype::F32 {
        check.equal("dtype", "BF16 or F16, which vLLM keeps", expected.config.dtype.name())?;
    }
    Ok(Identity {
        version: None,
        device: None,
        tp: 1,
        dtype: expected.config.dtype,
        config_compared: local.is_some(),
        tokenizer: check.tokenizer(expected, local)?,
        spans: false,
        incremental: true,
        no_checksums: Some("the checksums of vllm are not known here".into()),
        load_format: None,
        loads_only: None,
        flushes: false,
        labels_with_patch: false,
        sessions: false,
        saves_memory: false,
    })
}

/// An update in vLLM's words. The server keeps its fence until all of it is written.
async fn patch(client: &Client, load: Reload<'_>) -> Result<Patched> {
    let label = load.label;
    client.start_weight_update().await?;
    if let Some(refused) = client.update_weights(label).await? {
        // vLLM ends an update that fails.
        refused.log(client.url());
        return Ok(Patched::Untouched);
    }
    if load.pause == PauseMode::InPlace {
        empty_cache(client, load.pause).await?;
    }
    client.finish_weight_update(Some(label)).await?;
    expect_label(client, label).await.map(|()| Patched::Patched)
}

/// Requests that were retracted lose their cache here, and requests that were aborted may hold it a moment
/// longer.
async fn empty_cache(client: &Client, mode: PauseMode) -> Result<()> {
    if client.reset_prefix_cache(mode != PauseMode::InPlace).await? || mode == PauseMode::InPlace {
        return Ok(());
    }
    let expected = "done once every request is back in the queue";
    Err(Error::refused(client.url(), "reset_prefix_cache", expected, "refused"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::engine::ModelConfig;

    fn expected(hidden: u64, dtype: &str) -> Expected {
        let config = json!({"architectures": ["Qwen3ForCausalLM"], "hidden_size": hidden, "intermediate_size": 12,
            "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 70, "torch_dtype": dtype});
        let config = ModelConfig::parse(Path::new("c"), config.to_string().as_bytes()).unwrap();
        Expected { config, tokenizer: None }
    }

    #[test]
    fn compare_other_model_is_refused_by_name() {
        let want = expected(8, "bfloat16");
        assert!(compare("e", &want, Some(&want)).unwrap().config_compared);
        assert!(!compare("e", &want, None).unwrap().config_compared);
        for (want, local, name) in [
            (expected(8, "bfloat16"), expected(16, "bfloat16"), "hidden_size"),
            (expected(8, "bfloat16"), expected(8, "float16"), "torch_dtype"),
            (expected(8, "float32"), expected(8, "float32"), "dtype"),
        ] {
            let refused = compare("e", &want, Some(&local));
            assert!(matches!(&refused, Err(Error::Refused { what, .. }) if what == name), "{refused:?}");
        }
    }
}
