//! The arithmetic task's model: the shape that learns it, and its checkpoint's files. The task itself is
//! [`driftless_trainer::tasks::arithmetic`].

mod files;
mod recipe;

pub use files::files;
pub use recipe::Recipe;
