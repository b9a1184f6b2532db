//! An engine's pause: the label and state of an engine whose weights are unknown, and when it may continue.
//!
//! One rule holds for every way into an engine. It carries the label of a version only while it has that
//! version's weights, and it generates only while its weights are known. An engine with unknown weights is
//! fenced: paused, under a label that no request accepts.

use std::time::{Duration, Instant};

use driftless_transport::activate::Limit;

use crate::engine::{BETWEEN_TRIES, Engine, GenerateRequest, Label, PauseMode, expect_label, plain};
use crate::error::{Error, Result};

/// How long ending an activation may take, however it went.
const LAST_WORDS: Duration = Duration::from_secs(10);

/// How long one token may take, before the engine counts as paused or too busy to tell.
const TOKEN: Duration = Duration::from_secs(3);

/// What is known of an engine's pause.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pause {
    /// Whether it may be paused because of us. True at first: an earlier process may have died between pause
    /// and continue.
    owed: bool,
    /// Whether a call of the last activation got no answer. The engine may carry it out at any time, behind the continue
    /// too, and a pause would then be nobody's.
    late: bool,
    /// Whether its weights may be anything, whatever its label says.
    unknown: bool,
    /// Whether it was paused when it was last seen.
    on: bool,
    mode: PauseMode,
    began: Instant,
    took: Duration,
}

impl Default for Pause {
    fn default() -> Self {
        let (mode, began, took) = (PauseMode::Retract, Instant::now(), Duration::ZERO);
        Self { owed: true, late: false, unknown: false, on: false, mode, began, took }
    }
}

impl Pause {
    /// Whether it was paused when it was last seen, whoever paused it.
    pub(crate) fn is_on(&self) -> bool {
        self.on
    }

    /// How long the last pause that ended was.
    pub(crate) fn took(&self) -> Duration {
        self.took
    }

    /// The label of an engine's weights, `None` if they may be anything. An engine that we or a process
    /// before this one left paused goes on, unless its weights may be anything. None of this depends on what
    /// its weights generate.
    pub(crate) async fn look(&mut self, engine: &dyn Engine) -> Result<Option<String>> {
        let label = engine.label().await?;
        if self.is_fence(label.as_deref()) {
            self.on = ready(engine).await?.is_none_or(|ready| !ready);
            return Ok(None);
        }
        // After a load that failed this is the label of a new process, with the weights of its start.
        self.unknown = false;
        if self.owed {
            self.on = true;
            resume(engine).await?;
            generates(engine).await?;
            (self.owed, self.on) = (false, false);
        } else {
            self.on = match ready(engine).await? {
                Some(true) => false,
                None => self.on,
                // Paused, or its last health probe failed.
                Some(false) => self.on || matches!(token(engine).await?, Token::None),
            };
            if self.on && self.late {
                tracing::warn!(
                    engine = engine.url(),
                    "is paused behind its continue, and told to continue again"
                );
                resume(engine).await?;
                generates(engine).await?;
                (self.late, self.on) = (false, false);
            }
        }
        Ok(label)
    }

    /// Whether the weights under this label may be anything. After a load that failed no version's label is
    /// believed.
    fn is_fence(&self, label: Option<&str>) -> bool {
        label.is_some_and(|label| label.contains('?') || (self.unknown && label.parse::<Label>().is_ok()))
    }

    /// The engine is about to be paused, or, where it was left paused, to be brought to another version: the
    /// pause goes on then.
    pub(crate) fn begin(&mut self, mode: PauseMode) {
        if !(self.owed && self.on) {
            self.began = Instant::now();
        }
        (self.owed, self.on, self.mode) = (true, true, mode);
    }

    /// Its weights are about to be changed.
    pub(crate) fn touched(&mut self) {
        self.unknown = true;
    }

    /// Ends a pause in which `failed` happened, if anything: the engine goes on with the version, or with the
    /// weights labelled `serving` that it had where nothing was touched. Otherwise it stays paused, and so
    /// does one that generates nothing sound with the version.
    ///
    /// # Errors
    /// [`Error::LeftPaused`] if it should go on and does not; [`Error::Unsound`].
    pub(crate) async fn end(
        &mut self,
        engine: &dyn Engine,
        serving: Option<&str>,
        ask: Ask,
        failed: Option<&Error>,
    ) -> Result<()> {
        self.late = failed.is_some_and(|error| self.late || error.is_unanswered());
        match (failed, serving) {
            (None, _) => self.unknown = false,
            (Some(_), Some(serving)) if !self.unknown => {
                // It may be fenced already. If it keeps the fence, what it has is merely loaded over.
                let _ = engine.set_label(serving).await;
            }
            (Some(error), _) => {
                tracing::warn!(engine = engine.url(), %error, "stays paused: its weights may be anything");
                return Ok(());
            }
        }
        let left = |source| left_paused(engine, failed, source);
        resume(engine).await.map_err(left)?;
        self.took = self.began.elapsed();
        let token = goes_on(engine, ask).await.map_err(left)?;
        (self.owed, self.on) = (false, false);
        match token {
            Token::Unsound(source) if failed.is_none() => Err(self.fence(engine, source).await),
            _ => Ok(()),
        }
    }

    /// Something was done between two steps of an engine that was not paused, and took so long. It stays as it is, unless
    /// it is idle and generates nothing sound.
    ///
    /// # Errors
    /// [`Error::Unsound`].
    pub(crate) async fn passed(
        &mut self,
        engine: &dyn Engine,
        mode: PauseMode,
        took: Duration,
    ) -> Result<()> {
        (self.mode, self.took, self.late) = (mode, took, false);
        match goes_on(engine, Ask::TokenIfIdle).await? {
            Token::Unsound(source) => Err(self.fence(engine, source).await),
            Token::Sound | Token::None => Ok(()),
        }
    }

    /// Pauses an engine again that has gone on, because what it generates is no sample.
    async fn fence(&mut self, engine: &dyn Engine, source: Error) -> Error {
        (self.owed, self.unknown) = (true, true);
        let fenced = async {
            engine.pause(self.mode).await?;
            (self.on, self.began) = (true, Instant::now());
            let label = engine.label().await?.unwrap_or_default();
            relabel(engine, &partial(&label)).await.map(|()| label)
        };
        match fenced.await {
            Ok(label) => Error::Unsound { engine: engine.url().into(), label, source: Box::new(source) },
            Err(error) => error,
        }
    }
}

/// The time for ending an activation, which begins now.
pub(crate) fn last_words() -> Limit {
    Limit::within(LAST_WORDS)
}

/// An engine that could not be told to go on, after `first` had happened.
pub(crate) fn left_paused(engine: &dyn Engine, first: Option<&Error>, source: Error) -> Error {
    let first = first.map(ToString::to_string);
    Error::LeftPaused { engine: engine.url().into(), first, source: Box::new(source) }
}

/// Gives an engine a label, and sees that it took it.
pub(crate) async fn relabel(engine: &dyn Engine, label: &str) -> Result<()> {
    engine.set_label(label).await?;
    expect_label(engine, label).await
}

/// The label of an engine whose weights may be a mixture. It is no version's, so no request that asks for one
/// accepts it.
pub(crate) fn partial(label: &str) -> String {
    format!("{}?partial", plain(label))
}

/// What an engine that was told to go on is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ask {
    /// A token, whatever else it does.
    Token,
    /// A token, unless it has requests. Its prefill would hold them up for longer than a patch does, and whoever
    /// sent them checks what they generate.
    TokenIfIdle,
}

/// What a token that an engine was asked for says of it.
enum Token {
    /// It generates, as far as it was asked.
    Sound,
    /// It generates something that is no sample, such as NaN.
    Unsound(Error),
    /// None came in time: it is paused, or too busy.
    None,
}

/// Tells an engine to go on.
async fn resume(engine: &dyn Engine) -> Result<()> {
    let mut outcome = engine.resume().await;
    for _ in 1..3 {
        if outcome.is_ok() {
            break;
        }
        tokio::time::sleep(BETWEEN_TRIES).await;
        outcome = engine.resume().await;
    }
    outcome
}

/// Sees that an engine which was told to go on does, by its own account where it is not asked for a token.
async fn goes_on(engine: &dyn Engine, ask: Ask) -> Result<Token> {
    let spared = ask == Ask::TokenIfIdle && engine.is_busy().await? && ready(engine).await? != Some(false);
    if spared { Ok(Token::Sound) } else { generates(engine).await }
}

/// Sees that an engine which was told to go on does.
async fn generates(engine: &dyn Engine) -> Result<Token> {
    let token = token(engine).await?;
    if matches!(token, Token::None) && ready(engine).await? == Some(false) {
        let expected = "200 of /ready and a token afterwards";
        let found = format!("503, and no token within {TOKEN:?}");
        return Err(Error::refused(engine.url(), "continue_generation", expected, found));
    }
    Ok(token)
}

async fn token(engine: &dyn Engine) -> Result<Token> {
    let request = GenerateRequest::probe(vec![0], 1);
    match tokio::time::timeout(TOKEN, engine.generate(&request)).await {
        Ok(Ok(generation)) if !generation.output_ids.is_empty() => Ok(Token::Sound),
        Ok(Err(error @ Error::Reply { .. })) => Ok(Token::Unsound(error)),
        // Aborted, or no room in the queue.
        Ok(Ok(_) | Err(Error::Status { status: 429 | 503, .. })) => Ok(Token::None),
        Ok(Err(error)) if !matches!(error, Error::Deadline { .. }) => Err(error),
        _ => engine.abort(&request.rid).await.map(|()| Token::None),
    }
}

/// Whether an engine says that it takes requests, if it can tell.
async fn ready(engine: &dyn Engine) -> Result<Option<bool>> {
    match engine.ready().await {
        Err(Error::Status { .. }) => Ok(None),
        said => said,
    }
}
