//! Conversations that a program holds by itself: what it appends, and what the model answered, in OpenAI's form.

use serde_json::Value;

use super::{Drawn, Family, invalid};
use crate::message::{Json, Message, Refusal};
use crate::wire;

impl Family {
    /// Ids of messages behind an answer, with the start of the next one. The answer has the ids that were `sampled` behind
    /// `given`. An answer that was cut gets its end first. Text of messages never becomes a special token.
    ///
    /// # Errors
    /// [`Refusal::Invalid`] with the field of what is no message, and for a template that has no words for them.
    pub fn append(&self, messages: &[Json], given: &[i32], sampled: &[i32]) -> Result<Vec<i32>, Refusal> {
        let at = |index| format!("append_messages[{index}]");
        let read = messages.iter().enumerate().map(|(index, message)| wire::message(message, &at(index)));
        let read = read.collect::<Result<Vec<Message>, _>>()?;
        let behind = self.behind(&read, given, sampled)?;
        behind.ok_or_else(|| {
            let family = self.name();
            invalid(format!(
                "append_messages: expected a template that writes messages alone as it does behind others, found one of \
                 {family} that does not; expected `append`, or `input_ids`"
            ))
        })
    }

    /// An answer as a message. Its calls get ids that begin with `call_id`, where the model writes none; `tools`, a list in
    /// JSON, tell types of their arguments.
    ///
    /// # Errors
    /// [`Refusal::Broken`] for ids that the tokenizer cannot decode.
    pub fn answer(
        &self,
        given: &[i32],
        sampled: &[i32],
        tools: Option<&str>,
        call_id: &str,
    ) -> Result<Value, Refusal> {
        // Others than functions tell nothing.
        let tools: Vec<Json> = tools.and_then(|tools| serde_json::from_str(tools).ok()).unwrap_or_default();
        let drawn = Drawn { given, sampled, is_cut: false, stop: &[], tools: &tools };
        let said = self.said(&drawn, call_id).map_err(|error| Refusal::Broken(error.to_string()))?;
        Ok(wire::spoken(&said.message))
    }
}
