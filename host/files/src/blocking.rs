//! Runs work that blocks on a thread of its own.
//!
//! `tokio::task::spawn_blocking` panics if the system starts no further thread, which ends the task
//! of the caller. Work of a task that must go on needs an error instead.

use std::io;
use std::thread::Builder;

use tokio::runtime::Handle;
use tokio::sync::oneshot;

/// Why work has no result.
#[derive(Debug, thiserror::Error)]
pub enum BlockingError {
    /// The work was not begun. It may succeed later.
    #[error("cannot start a thread: {0}")]
    Thread(#[from] io::Error),
    /// The work panicked.
    #[error("a panic, which is a bug")]
    Panicked,
}

/// Runs work on a thread with this name, within the runtime of the caller. The work goes on if the
/// future is dropped.
///
/// # Errors
/// [`BlockingError`].
pub async fn run<T, F>(name: &str, work: F) -> Result<T, BlockingError>
where
    T: Send + 'static,
    F: FnOnce() -> T + Send + 'static,
{
    run_on(Builder::new().name(name.to_owned()), work).await
}

async fn run_on<T, F>(thread: Builder, work: F) -> Result<T, BlockingError>
where
    T: Send + 'static,
    F: FnOnce() -> T + Send + 'static,
{
    let (send, result) = oneshot::channel();
    let runtime = Handle::current();
    thread.spawn(move || {
        let _within = runtime.enter();
        // Fails if the caller does not wait any more.
        let _ = send.send(work());
    })?;
    // A panic drops the sender.
    result.await.map_err(|_| BlockingError::Panicked)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn result_of_work_is_returned_and_a_panic_is_an_error() {
        assert_eq!(run("work", || 7).await.unwrap(), 7);
        let panicked = run("work", || panic!("on purpose")).await;
        assert!(matches!(panicked, Err(BlockingError::Panicked)));
    }

    #[tokio::test]
    async fn missing_thread_is_an_error() {
        // No address space has room for this stack.
        let thread = Builder::new().stack_size(usize::MAX / 2);
        let refused = run_on(thread, || ()).await;
        assert!(matches!(refused, Err(BlockingError::Thread(_))));
    }
}
