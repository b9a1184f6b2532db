//! How often a letter occurs.

use super::{Draw, Kind, Problem, is_integer};

pub(super) const KIND: Kind = Kind {
    name: "letter_counting",
    what: "how often a letter occurs in a made-up word, of two more letters at each difficulty",
    draw,
    right: is_integer,
};

fn draw(draw: &mut Draw, difficulty: u32) -> Problem {
    // Consonants and vowels in turn, of few, so that most letters occur more than once.
    let (consonants, vowels) = (['b', 'd', 'l', 'n', 'r', 's', 't'], ['a', 'e', 'i', 'o']);
    let length = 4 + 2 * difficulty;
    let letters =
        (0..length).map(|at| if at % 2 == 0 { draw.one_of(&consonants) } else { draw.one_of(&vowels) });
    let word: String = letters.collect();
    let letter = if draw.number(0..=1) == 0 { draw.one_of(&consonants) } else { draw.one_of(&vowels) };
    let count = word.chars().filter(|other| *other == letter).count();
    Problem {
        question: format!(
            "How many times does the letter {letter} occur in \"{word}\"? Answer with a number only."
        ),
        label: count.into(),
        answer: count.to_string(),
    }
}
