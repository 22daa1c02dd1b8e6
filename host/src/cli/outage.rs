//! Continues a command that asks a running store again and again, also while the store restarts.

use super::output::{Failure, notice};

/// What the last answers were.
#[derive(Default)]
pub(super) struct Outage {
    /// The store has answered once, so the command line is right.
    has_answered: bool,
    is_under_way: bool,
}

impl Outage {
    /// The answer to a question; none if there is no answer at present, so that the command asks
    /// again later. Says once that this is so, and once that it has ended.
    ///
    /// Fails if the store refuses, and if it has never answered.
    pub(super) fn note<T>(&mut self, answer: Result<T, Failure>) -> Result<Option<T>, Failure> {
        match answer {
            Ok(answer) => {
                self.has_answered = true;
                if std::mem::take(&mut self.is_under_way) {
                    notice("the store answers again");
                }
                Ok(Some(answer))
            }
            Err(failure) if self.has_answered && failure.is_transport() => {
                if !std::mem::replace(&mut self.is_under_way, true) {
                    notice(failure.with("Asking again until it answers").message());
                }
                Ok(None)
            }
            Err(failure) => Err(failure),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_store_that_has_answered_is_asked_again() {
        let mut outage = Outage::default();
        let lost = || Err::<(), _>(Failure::transport("no answer"));
        assert!(outage.note(lost()).is_err());
        assert_eq!(outage.note(Ok(())), Ok(Some(())));
        assert_eq!(outage.note(lost()), Ok(None));
        assert_eq!(outage.note(lost()), Ok(None));
        let refused = || Err::<(), _>(Failure::refused("not authorized"));
        assert_eq!(outage.note(refused()), refused().map(Some));
        assert_eq!(outage.note(Ok(())), Ok(Some(())));
    }
}
