//! What to do about an alert of a run.

/// The remedy for the alert of this name (`events::Alert`); empty for one that this release does not know.
pub(crate) fn remedy(alert: &str) -> &'static str {
    match alert {
        "mismatch" => {
            "give engines and trainer the same dtype and kernels, look at the answers that they are furthest apart on \
             (`driftless log show RUN --mismatch`), and correct what is left with --use-tis"
        }
        "entropy_collapse" => {
            "lower --lr, raise --entropy-coef or --eps-clip-high, or go back to an earlier checkpoint"
        }
        "zero_variance" => {
            "take prompts of another difficulty, more --n-samples-per-prompt, or --dynamic-sampling-filter \
             check_reward_nonzero_std"
        }
        "truncation" => {
            "read the answers (`driftless log show RUN --worst`); raise --rollout-max-response-len if they are sound"
        }
        "at_bound" => {
            "engines are ahead of the learner for good: lower --max-staleness, which makes tokens younger and costs no time, or \
             give the learner more devices"
        }
        "too_old" => "raise --max-staleness, or lower --rollout-max-response-len",
        "failures" => "`driftless log show RUN --left-out` says why each was",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use driftless::trainer::events::Alert;

    #[test]
    fn remedy_is_there_for_each_alert() {
        for alert in Alert::ALL {
            assert!(!remedy(alert.name()).is_empty(), "{alert:?}");
        }
    }

    #[test]
    fn remedies_name_flags_that_commands_have() {
        let command = crate::cli::command();
        let commands =
            command.get_subcommands().flat_map(|sub| std::iter::once(sub).chain(sub.get_subcommands()));
        let known: Vec<_> =
            commands.flat_map(|sub| sub.get_arguments().filter_map(|arg| arg.get_long())).collect();
        let remedies = Alert::ALL.map(|alert| remedy(alert.name())).join("\n");
        let page = include_str!("../dashboard/page/goodput.js").lines();
        // Others have names of colours.
        let page: String = page.filter(|line| line.trim_start().starts_with("[\"")).collect();
        let flags = |text: &str| -> Vec<String> {
            let name = |rest: &str| {
                rest.split(|letter: char| !letter.is_ascii_lowercase() && letter != '-')
                    .next()
                    .map(str::to_owned)
            };
            let names = text.split("--").skip(1).filter_map(name);
            names.filter(|name| name.starts_with(|letter: char| letter.is_ascii_lowercase())).collect()
        };
        for text in [&*remedies, &*page] {
            let flags = flags(text);
            assert!(!flags.is_empty(), "{text}");
            let lost: Vec<_> = flags.iter().filter(|flag| !known.contains(&flag.as_str())).collect();
            assert!(lost.is_empty(), "no command has {lost:?}");
        }
    }
}
