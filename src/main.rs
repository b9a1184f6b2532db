//! The `driftless` command: parse, call, print.

fn main() -> std::process::ExitCode {
    driftless::command::main(std::env::args_os()).into()
}
