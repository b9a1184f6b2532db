//! The `driftless` command: parse, call, print.

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
