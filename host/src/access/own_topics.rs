//! Topics that belong to one client: those of its answers, `clients/{id}/…`.
//!
//! In comes a client id and a filter; out goes whether somebody else's answers could come by it. Only asked where clients
//! show who they are and no rules say more: among clients whose ids anybody can take it would protect nobody.

/// What the topics of clients begin with.
const CLIENTS: &[u8] = b"clients";

/// What the notifications of the store have in place of an id. They go to nobody but who watches, subscribed or not.
const STORE: &[u8] = b"statestore";

/// Whether the filter matches a topic below `clients/{id}/` of another id.
pub(super) fn is_of_another(client: &str, filter: &[u8]) -> bool {
    let mut levels = filter.split(|byte| *byte == b'/');
    let (first, second, third) = (levels.next(), levels.next(), levels.next());
    match (first, second) {
        (Some(b"#"), None) => true,
        (Some(b"+" | CLIENTS), Some(b"#")) => true,
        (Some(b"+" | CLIENTS), Some(b"+")) => third.is_some(),
        (Some(b"+" | CLIENTS), Some(id)) => {
            third.is_some() && id != STORE && id != client.as_bytes()
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_hears_the_answers_to_another() {
        for (filter, expected) in [
            ("clients/me/response", false),
            ("clients/me/#", false),
            ("clients/me/+/answer", false),
            ("clients/you/response", true),
            ("clients/you/#", true),
            ("clients/ME/#", true),
            ("clients/+/response", true),
            ("clients/+/#", true),
            ("clients/#", true),
            ("#", true),
            ("+/#", true),
            ("+/+/#", true),
            ("+/you/response", true),
            ("+/me/response", false),
            // These match no topic below an id.
            ("clients/+", false),
            ("clients", false),
            ("+/temperature", false),
            ("+", false),
            ("news/+/#", false),
            ("clients/statestore/v1/store/+/command/notify/+", false),
        ] {
            assert_eq!(is_of_another("me", filter.as_bytes()), expected, "{filter}");
        }
        // An id is no pattern.
        assert!(is_of_another("+", b"clients/you/response"));
        assert!(is_of_another("#", b"clients/#"));
    }
}
