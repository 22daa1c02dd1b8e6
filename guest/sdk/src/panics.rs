//! Reports a panic to the host before the call ends in a trap, which itself says nothing.

use std::panic::{self, PanicHookInfo};

use crate::{Host, Imports, Level};

/// Logs the message, file and line of every panic from here on.
pub fn report() {
    panic::set_hook(Box::new(|panic| Imports.log(Level::Error, &line(panic))));
}

/// `FILE:LINE: MESSAGE`, on one line. The host names it as the cause of the failure.
fn line(panic: &PanicHookInfo<'_>) -> String {
    let message = panic.payload_as_str().unwrap_or("a panic");
    let parts: Vec<&str> = message.lines().map(str::trim).collect();
    let message = parts.join("; ");
    match panic.location() {
        Some(place) => format!("{}:{}: {message}", place.file(), place.line()),
        None => message,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    thread_local! {
        static LINE: RefCell<String> = const { RefCell::new(String::new()) };
    }

    #[test]
    fn line_has_file_line_and_message() {
        let before = panic::take_hook();
        panic::set_hook(Box::new(|panic| LINE.set(line(panic))));
        let thrown = panic::catch_unwind(|| assert_eq!(1 + 1, 3));
        panic::set_hook(before);
        assert!(thrown.is_err());
        let line = LINE.take();
        let message = "assertion `left == right` failed; left: 2; right: 3";
        assert!(line.contains("src/panics.rs:"), "{line}");
        assert!(line.ends_with(message), "{line}");
    }
}
