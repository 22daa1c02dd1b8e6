//! A foreign broker as a transport: the store is one client among others, over `statehouse_link`.
//!
//! What enters: PUBLISHes on the request topics, and signs of who has gone. What leaves: answers and notifications, and
//! the PUBACK of a request once its effect is durable and the broker has taken what it led to.

pub mod identity;
pub mod kick;
pub mod presence;
