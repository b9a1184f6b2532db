//! The figures of a step, as sinks want them: a number for each name.

use serde_json::Value;

use driftless_trainer::metrics::StepMetrics;

/// The numbers of a line of `metrics.jsonl`, each with the path to it. Numbers in lists have no path of their own, and
/// are left out; so are the step's number and its moment, which every sink has apart.
pub(crate) fn of(step: &StepMetrics) -> Vec<(Vec<String>, f64)> {
    let mut scalars = Vec::new();
    // A value without maps of other keys than text serialises.
    let line = serde_json::to_value(step).unwrap_or_default();
    collect(&line, &mut Vec::new(), &mut scalars);
    scalars.retain(|(path, _)| !["rollout_id", "completed_at_ms"].contains(&path[0].as_str()));
    scalars
}

fn collect(value: &Value, path: &mut Vec<String>, scalars: &mut Vec<(Vec<String>, f64)>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                path.push(name.clone());
                collect(value, path, scalars);
                path.pop();
            }
        }
        Value::Bool(is) => scalars.push((path.clone(), f64::from(u8::from(*is)))),
        Value::Number(number) => scalars.extend(number.as_f64().map(|number| (path.clone(), number))),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use driftless_trainer::metrics::PublicationMetrics;

    #[test]
    fn numbers_have_their_paths_and_lists_have_none() {
        let publication = PublicationMetrics { density: 0.25, ..PublicationMetrics::default() };
        let step = StepMetrics {
            rollout_id: 3,
            reward: 0.5,
            staleness: vec![1, 2],
            skipped: true,
            rewards: [("a/b".to_owned(), 2.0)].into(),
            publication: Some(publication),
            ..StepMetrics::default()
        };
        let scalars = of(&step);
        let found = |path: &[&str]| scalars.iter().find(|(at, _)| at == path).map(|(_, value)| *value);
        assert_eq!(found(&["reward"]), Some(0.5));
        assert_eq!(found(&["skipped"]), Some(1.0));
        assert_eq!(found(&["rewards", "a/b"]), Some(2.0));
        assert_eq!(found(&["publication", "density"]), Some(0.25));
        assert_eq!((found(&["rollout_id"]), found(&["staleness"])), (None, None));
    }
}
