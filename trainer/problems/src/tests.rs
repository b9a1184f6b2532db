#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::*;
use std::collections::BTreeSet;

/// Every kind, difficulty and some numbers.
fn each(mut check: impl FnMut(&Kind, u32, &Problem)) {
    for kind in Kind::ALL {
        for difficulty in 1..=Kind::DIFFICULTY_MAX {
            for number in 0..200 {
                check(kind, difficulty, &kind.problem(1, number, difficulty));
            }
        }
    }
}

#[test]
fn answer_of_each_problem_is_right_however_it_is_wrapped() {
    each(|kind, difficulty, problem| {
        let answer = &problem.answer;
        let wrapped = [
            answer.clone(),
            format!(" {answer}\n"),
            format!("<think>perhaps 17</think>{answer}"),
            format!("It is <answer>{answer}</answer>."),
            format!(r"So \boxed{{{answer}}}"),
        ];
        for said in wrapped {
            assert!(kind.right(&problem.label, &said), "{} {difficulty}: {problem:?}: {said}", kind.name);
        }
    });
}

#[test]
fn text_without_an_answer_is_wrong() {
    each(|kind, difficulty, problem| {
        for said in ["", "I do not know", "999999999999", "-", "()", "\u{0}"] {
            assert!(!kind.right(&problem.label, said), "{} {difficulty}: {problem:?}: {said}", kind.name);
        }
    });
}

/// The answer of another problem is right only where the two have one label: a wrong answer does not pass.
#[test]
fn answer_of_another_problem_is_wrong() {
    for kind in Kind::ALL {
        for difficulty in 1..=Kind::DIFFICULTY_MAX {
            let problems: Vec<_> = (0..40).map(|number| kind.problem(2, number, difficulty)).collect();
            for (ours, theirs) in problems.iter().flat_map(|a| problems.iter().map(move |b| (a, b))) {
                let same = ours.label == theirs.label;
                assert_eq!(
                    kind.right(&ours.label, &theirs.answer),
                    same,
                    "{}: {ours:?} {theirs:?}",
                    kind.name
                );
            }
        }
    }
}

#[test]
fn problems_follow_from_seed_number_and_difficulty() {
    for kind in Kind::ALL {
        let questions = |seed, difficulty| -> Vec<String> {
            (0..200).map(|number| kind.problem(seed, number, difficulty).question).collect()
        };
        assert_eq!(questions(1, 4), questions(1, 4));
        assert_ne!(questions(1, 4), questions(2, 4));
        assert_ne!(questions(1, 4), questions(1, 5));
        let distinct = questions(1, 4).into_iter().collect::<BTreeSet<_>>().len();
        assert!(distinct > 150, "{}: {distinct} of 200", kind.name);
    }
}

#[test]
fn answers_follow_from_the_questions() {
    // What is asked is computed a second time from the words of the question.
    each(|kind, _, problem| {
        let numbers = integers(&problem.question);
        match kind.name {
            "arithmetic" => {
                let reversed: String = problem.answer.chars().rev().collect();
                assert_eq!(integers(&reversed), [numbers[0] + numbers[1]], "{}", problem.question);
            }
            "chain_sum" => {
                let words: Vec<_> = problem.question.split_whitespace().collect();
                let sum: i64 = words
                    .windows(2)
                    .filter_map(|pair| {
                        let term: i64 = pair[1].trim_end_matches('?').parse().ok()?;
                        Some(if pair[0] == "-" { -term } else { term })
                    })
                    .sum();
                assert_eq!(problem.label, sum, "{}", problem.question);
            }
            "gcd" => {
                let divides = |d: &i64| numbers[0] % d == 0 && numbers[1] % d == 0;
                let greatest = (1..=numbers[0]).rev().find(divides).unwrap();
                assert_eq!(problem.label, greatest, "{}", problem.question);
            }
            "base_conversion" => {
                let back = i64::from_str_radix(&problem.answer, numbers[1] as u32).unwrap();
                assert_eq!(back, numbers[0], "{}", problem.question);
            }
            "simple_equations" => {
                let x = problem.label.as_i64().unwrap();
                let term = if problem.question.contains("x + ") { numbers[1] } else { -numbers[1] };
                assert_eq!(numbers[0] * x + term, numbers[2], "{}", problem.question);
            }
            "letter_counting" => {
                let letter = problem.question.split("letter ").nth(1).unwrap().chars().next().unwrap();
                let word = problem.question.split('"').nth(1).unwrap();
                assert_eq!(problem.label, word.matches(letter).count(), "{}", problem.question);
            }
            "prime_factorization" => {
                let product: i64 =
                    problem.label.as_array().unwrap().iter().map(|f| f.as_i64().unwrap()).product();
                assert_eq!(product, numbers[0], "{}", problem.question);
            }
            _ => {}
        }
    });
}

#[test]
fn several_ways_to_write_an_answer_are_right() {
    let right = |name: &str, label: Value, said: &str| Kind::named(name).unwrap().right(&label, said);
    assert!(right("chain_sum", (-1234).into(), "12 - 1246 = -1,234."));
    assert!(right("chain_sum", 7.into(), "The answer is **7**."));
    assert!(!right("chain_sum", 7.into(), "17"));
    assert!(right("prime_factorization", vec![2, 2, 3].into(), "12 = 2^2 * 3"));
    assert!(!right("prime_factorization", vec![2, 2, 3].into(), "4 * 3"));
    let label = serde_json::json!({"numbers": [2, 3, 4], "target": 20});
    assert!(right("countdown", label.clone(), "(2 + 3) * 4 = 20"));
    assert!(!right("countdown", label.clone(), "4 * 5 = 20"));
    assert!(!right("countdown", label, "20"));
    assert!(right("arithmetic", "29".into(), "29"));
    for wrong in ["92", "290", "2", "34+58=29"] {
        assert!(!right("arithmetic", "29".into(), wrong), "{wrong}");
    }
    assert!(right("base_conversion", "ff".into(), "0xFF."));
}

#[test]
fn integers_of_a_text_are_found_with_signs_and_thousands() {
    assert_eq!(integers("a1 -2 3-4 (5)-6 1,234 1,23 −7"), [1, -2, 3, 4, 5, 6, 1234, 1, 23, -7]);
    assert_eq!(integers("99999999999999999999 1"), [1]);
}
