//! Problems that are made up.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use driftless_problems::{Kind, Problem};
use serde_json::json;

use super::DataSource;
use crate::data::{Dataset, Example, RowReader, Tokenizer, vocabulary};
use crate::error::{Error, Place, Result, input};
use crate::reward::{Given, Reward};
use crate::sample::{Answer, Prompt};
use crate::seed::{first_bits, mix};

/// One problem in so many is held out.
const HELD_OUT_OF: u64 = 10;
/// Problems that a checkpoint's tokenizer has to have tokens for.
const SPELLED: u64 = 32;
/// Problems that are looked at for one that belongs to a split.
const TRIES_MAX: u64 = 10_000;

/// Prompts that are problems of a kind. The kind is their reward: 1 for a right answer, 0 for any other.
#[derive(Debug)]
pub struct Generated {
    kind: &'static Kind,
    difficulty: u32,
    seed: u64,
    /// The problems in their order, where they are all asked once.
    all: Option<Vec<Problem>>,
    reader: RowReader,
    path: Arc<Path>,
}

impl Generated {
    /// Problems to practise, drawn by `seed`. The reader's options say how they become prompts; its names of
    /// fields do not matter.
    #[must_use]
    pub fn practice(kind: &'static Kind, difficulty: u32, seed: u64, mut reader: RowReader) -> Self {
        reader.options.input_key = "question".to_owned();
        reader.options.label_key = Some("label".to_owned());
        Generated { kind, difficulty, seed, all: None, reader, path: Path::new(kind.name).into() }
    }

    /// So many problems that are only for measuring, no two of them the same. None of them is ever practised.
    ///
    /// # Errors
    /// [`Error::Input`] if the kind has fewer of this difficulty.
    pub fn held_out(kind: &'static Kind, difficulty: u32, count: usize, reader: RowReader) -> Result<Self> {
        let mut questions = BTreeSet::new();
        let drawn = (0..TRIES_MAX.max(100 * count as u64)).map(|number| kind.problem(0, number, difficulty));
        let held_out = drawn.filter(is_held_out).filter(|problem| questions.insert(problem.question.clone()));
        let all: Vec<_> = held_out.take(count).collect();
        if all.len() < count {
            let expected =
                format!("at most {} of {} at `task_difficulty` {difficulty}", all.len(), kind.name);
            return Err(input("n_eval_prompts", expected, count));
        }
        Ok(Generated { all: Some(all), ..Self::practice(kind, difficulty, 0, reader) })
    }

    /// So many problems to practise with their right answers, as conversations for supervised training. The
    /// reader's options say what of a conversation is learned. They are those of [`Generated::practice`].
    ///
    /// # Errors
    /// [`Error::Input`] if the reader's chat template cannot say which part is the answer, or the conversation is
    /// too long.
    pub fn worked(
        kind: &'static Kind,
        difficulty: u32,
        seed: u64,
        count: u64,
        reader: RowReader,
    ) -> Result<Dataset> {
        let task = Self::practice(kind, difficulty, seed, reader);
        let examples = (0..count)
            .map(|number| {
                let Problem { question, answer, .. } = task.problem(number)?;
                let message = |role, content| json!({ "role": role, "content": content });
                let row = json!({
                    "question": [message("user", question), message("assistant", answer.clone())], "label": answer,
                });
                task.read(number, &row)
            })
            .collect::<Result<_>>()?;
        let tokenizer = task.reader.tokenizer().clone();
        Ok(Dataset { examples, refused: Vec::new(), bad: 0, too_long: 0, tokenizer })
    }

    fn read(&self, number: u64, row: &serde_json::Value) -> Result<Example> {
        let place = Place { path: self.path.clone(), line: number };
        let refused = |why: crate::data::Refused| input(format!("task {}", self.kind.name), "a prompt", why);
        self.reader.read(&row.to_string(), place).map_err(refused)
    }

    fn problem(&self, number: u64) -> Result<Problem> {
        if let Some(all) = self.all.as_ref().filter(|all| !all.is_empty()) {
            return Ok(all[(number % all.len() as u64) as usize].clone());
        }
        let tries = (0..TRIES_MAX).map(|attempt| {
            let number = mix(number).wrapping_add(attempt);
            self.kind.problem(self.seed, number, self.difficulty)
        });
        let mut practised = tries.filter(|problem| !is_held_out(problem));
        practised.next().ok_or_else(|| {
            input(format!("task {}", self.kind.name), "problems that are not held out", "none")
        })
    }
}

/// A hash of the question decides, so that a problem is held out whatever its seed and number.
fn is_held_out(problem: &Problem) -> bool {
    first_bits(blake3::hash(problem.question.as_bytes()).as_bytes()).is_multiple_of(HELD_OUT_OF)
}

#[async_trait]
impl DataSource for Generated {
    /// The model has to have every id of the tokenizer, and the tokenizer a token for each part of a problem.
    fn check(&self, checkpoint: &Path) -> Result<()> {
        let other = |expected, found| Error::OtherTokenizer { path: checkpoint.to_owned(), expected, found };
        let tokenizer = self.reader.tokenizer();
        let (size, ids) = (vocabulary(checkpoint)?, tokenizer.ids());
        if let Some(size) = size.filter(|size| ids > *size) {
            let expected = format!("ids below the model's vocab_size, {size}");
            return Err(other(expected, format!("{ids} ids in tokenizer.json")));
        }
        for number in 0..SPELLED {
            let Problem { question, answer, .. } = self.problem(number)?;
            let text = question + &answer;
            let read = tokenizer.decode(&tokenizer.encode(&text)?)?;
            // Some tokenizers have one case, or put spaces before words.
            let letters = |text: &str| text.to_lowercase().split_whitespace().collect::<String>();
            if letters(&read) != letters(&text) {
                return Err(other(format!("tokens for `{text}`"), format!("`{read}`")));
            }
        }
        Ok(())
    }

    async fn prompt(&self, number: u64) -> Result<Prompt> {
        let Problem { question, label, .. } = self.problem(number)?;
        Ok(self.read(number, &json!({ "question": question, "label": label }))?.into())
    }

    fn digest(&self) -> Option<String> {
        Some(format!("{} at difficulty {}", self.kind.name, self.difficulty))
    }

    fn tokenizer(&self) -> &Tokenizer {
        self.reader.tokenizer()
    }
}

/// 1 for a right answer, 0 for any other.
#[async_trait]
impl Reward for &'static Kind {
    async fn score(&self, answers: &[Answer]) -> Result<Vec<Result<Given>>> {
        let reward = |answer: &Answer| {
            let label = answer.label.as_deref().and_then(|label| serde_json::from_str(label.get()).ok());
            let right = label.is_some_and(|label| self.right(&label, &answer.response));
            f32::from(u8::from(right))
        };
        Ok(answers.iter().map(|answer| Ok(reward(answer).into())).collect())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use crate::data::DataOptions;
    use crate::tasks::tiny;
    use driftless_agent::chat::LossMask;

    fn reader() -> RowReader {
        tiny::reader(DataOptions::default()).unwrap()
    }

    #[test]
    fn held_out_problems_are_distinct_and_never_practised() {
        for kind in Kind::ALL {
            let held_out = Generated::held_out(kind, 3, 64, reader()).unwrap().all.unwrap();
            let held_out: BTreeSet<_> = held_out.into_iter().map(|problem| problem.question).collect();
            assert_eq!(held_out.len(), 64, "{}", kind.name);
            let practice = Generated::practice(kind, 3, 7, reader());
            let met =
                (0..2000).filter(|n| held_out.contains(&practice.problem(*n).unwrap().question)).count();
            assert_eq!(met, 0, "{}", kind.name);
        }
    }

    #[test]
    fn held_out_count_beyond_the_problems_is_refused() {
        let kind = Kind::named("chain_sum").unwrap();
        let words = Generated::held_out(kind, 1, 512, reader()).unwrap_err().to_string();
        assert!(words.contains("n_eval_prompts") && words.contains("at most"), "{words}");
    }

    #[test]
    fn worked_problems_are_practised_ones_with_learned_answers() {
        let template = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}\
            {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), tiny::tokenizer().to_string()).unwrap();
        std::fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
        let options = DataOptions { loss_mask: Some(LossMask::Qwen), ..DataOptions::default() };
        let reader = RowReader::open(options, dir.path()).unwrap();
        let kind = Kind::named("chain_sum").unwrap();
        let worked = Generated::worked(kind, 2, 7, 3, reader.clone()).unwrap();
        let task = Generated::practice(kind, 2, 7, reader);
        for (number, example) in (0..).zip(&worked.examples) {
            let Problem { question, answer, .. } = task.problem(number).unwrap();
            assert!(example.text.contains(&question), "{}", example.text);
            let learned = example.tokens.iter().zip(&example.loss_mask).filter(|(_, mask)| **mask == 1);
            let learned: Vec<_> = learned.map(|(token, _)| *token).collect();
            let said = task.tokenizer().decode(&learned).unwrap();
            assert!(said.starts_with(&answer) && !said.contains("What"), "{said} after {question}");
        }
        assert_eq!(worked.examples.len(), 3);
    }

    #[test]
    fn worked_sum_has_a_token_for_each_character() {
        let options = DataOptions { loss_mask: Some(LossMask::Generation), ..DataOptions::default() };
        let kind = Kind::named("arithmetic").unwrap();
        let worked = Generated::worked(kind, 1, 7, 8, tiny::reader(options).unwrap()).unwrap();
        for example in &worked.examples {
            let words: String = example.tokens.iter().map(|id| tiny::VOCABULARY[*id as usize]).collect();
            assert_eq!(words, example.text);
            let question = words.find('=').unwrap() + 1;
            assert!(words.ends_with("<eos>") && question == 6, "{words}");
            let learned = example.loss_mask.iter().position(|learned| *learned == 1);
            assert_eq!(learned, Some(question), "{words}");
            assert!(example.loss_mask[question..].iter().all(|learned| *learned == 1), "{words}");
        }
    }

    #[test]
    fn tokenizer_without_tokens_for_the_problems_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), r#"{"vocab_size": 16}"#).unwrap();
        let check = |kind| Generated::practice(Kind::named(kind).unwrap(), 1, 7, reader()).check(dir.path());
        check("arithmetic").unwrap();
        let words = check("chain_sum").unwrap_err().to_string();
        assert!(words.contains("tokens for `What is") && words.contains("<unk>"), "{words}");
        std::fs::write(dir.path().join("config.json"), r#"{"vocab_size": 15}"#).unwrap();
        let words = check("arithmetic").unwrap_err().to_string();
        assert!(words.contains("vocab_size, 15") && words.contains("16 ids"), "{words}");
    }

    #[tokio::test]
    async fn answers_are_rewarded_by_the_label_of_their_prompt() {
        let kind = Kind::named("chain_sum").unwrap();
        let problem = kind.problem(7, 5, 2);
        let answer = |response: &str| Answer {
            sample: 1,
            prompt: problem.question.clone(),
            response: response.to_owned(),
            label: serde_json::value::RawValue::from_string(problem.label.to_string()).ok(),
            metadata: None,
            truncated: false,
            response_length: 1,
            given: None,
        };
        let group =
            [answer(&problem.answer), answer("no"), Answer { label: None, ..answer(&problem.answer) }];
        let scored = kind.score(&group).await.unwrap().into_iter();
        assert_eq!(scored.map(|given| given.unwrap().reward).collect::<Vec<_>>(), [1.0, 0.0, 0.0]);
    }
}
