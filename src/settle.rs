//! What becomes of an answer: it is judged, captured, kept or not, and only then sent.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::Instant,
};

use actix_web::{
    HttpResponse, ResponseError,
    body::{BoxBody, EitherBody, MessageBody},
    http::StatusCode,
};

use crate::{
    atomic::Atomic,
    case::Case,
    extract::{IdemKey, Slot, Used, Verdict},
    lease::{Ended, Lease},
    policy::{OnCompleted, OnFailure, Policy, Return},
    refusal::{self, Code, Refusal},
    snapshot::{self, Buffered, ResponseSnapshot},
    telemetry::{self, Event},
    transaction::{Commit, Transaction},
};

/// What a request holds while its handler runs.
#[derive(Debug)]
pub(crate) enum Hold {
    /// A row in the table, for a time that is renewed.
    Lease(Lease),
    /// The transaction itself.
    Atomic(Box<Atomic>),
}

impl Hold {
    pub(crate) async fn keep(self, transaction: Option<Transaction>, snapshot: ResponseSnapshot) -> Ended {
        let began = Instant::now();
        let ended = match (self, transaction) {
            (Self::Lease(lease), None) => lease.complete(snapshot).await,
            (Self::Lease(lease), Some(transaction)) => lease.commit(transaction, snapshot).await,
            (Self::Atomic(atomic), None) => atomic.keep(&snapshot).await,
            (Self::Atomic(atomic), Some(transaction)) => atomic.commit(transaction, snapshot).await,
        };
        telemetry::completed(began);
        ended
    }

    /// Nothing is done: what the handler wrote was rolled back.
    pub(crate) async fn give_back(self, status: StatusCode, how: Return) -> Ended {
        match self {
            Self::Lease(lease) => lease.give_back(status, how).await,
            // It has left nothing behind.
            Self::Atomic(_) => Ended::Landed,
        }
    }

    fn attempt(&self) -> i32 {
        match self {
            Self::Lease(lease) => lease.attempt,
            Self::Atomic(_) => 1,
        }
    }

    fn abandon(self) {
        match self {
            Self::Lease(lease) => lease.abandon(),
            Self::Atomic(_) => {}
        }
    }
}

/// What is to be done with an answer.
enum Course {
    /// Keep it: in this transaction, where there is one.
    Keep { transaction: Option<Transaction>, body: bool },
    /// Roll back, and give the key back; where there is a code, the answer is that.
    GiveBack { transaction: Option<Transaction>, how: Return, instead: Option<Code> },
    /// Roll back, and keep the answer all the same.
    RollBackAndKeep { transaction: Option<Transaction>, body: bool },
    /// The handler has stored its answer by itself.
    Stored { transaction: Option<Transaction>, snapshot: ResponseSnapshot },
    /// Its transaction is out of reach.
    Abandon,
}

/// An error leaves no writes behind; a success commits them, or contradicts itself.
/// `failed`: what becomes of the key where the handler's answer is not what is told.
fn judge(
    status: StatusCode,
    verdict: Verdict,
    used: Used,
    completed: Option<ResponseSnapshot>,
    failed: Return,
) -> Course {
    let success = status.as_u16() < 400;
    let body = verdict != Verdict::KeepWithoutBody;
    let (was_used, transaction) = match used {
        Used::Kept => return Course::Abandon,
        Used::Failed(code, transaction) => {
            let instead = success.then_some(code);
            return Course::GiveBack { transaction, how: Return::Release, instead };
        }
        // Whatever the handler has made of it: with a transaction that begins anew it may go well.
        Used::Back(transaction) if completed.is_none() && transaction.has_lost_a_race() => {
            let how = if let Verdict::Back(how) = verdict { how } else { failed };
            return Course::GiveBack { transaction: Some(transaction), how, instead: Some(Code::Serialization) };
        }
        Used::Back(transaction) => (true, Some(transaction)),
        Used::Not(transaction) => (false, transaction),
    };
    match (completed, verdict) {
        (Some(snapshot), _) => Course::Stored { transaction: transaction.filter(|_| was_used), snapshot },
        (None, Verdict::Back(how)) => {
            let instead = (success && was_used).then_some(Code::TransactionMisused);
            if instead.is_some() {
                telemetry::misconfigured(
                    "a handler has used IdemTx, and its answer of success gives the key back: its writes are rolled back",
                );
            }
            Course::GiveBack { transaction, how, instead }
        }
        (None, Verdict::Keep | Verdict::KeepWithoutBody) if success => Course::Keep { transaction, body },
        (None, Verdict::Keep | Verdict::KeepWithoutBody) => Course::RollBackAndKeep { transaction, body },
    }
}

impl Case {
    /// The answer that is sent for the handler's.
    pub(crate) async fn settle<B>(
        &self,
        hold: Hold,
        key: &IdemKey,
        slot: &Slot,
        mut response: HttpResponse<B>,
    ) -> HttpResponse<EitherBody<B>>
    where
        B: MessageBody + 'static,
    {
        snapshot::remove_markers(response.headers_mut(), &self.policy);
        let status = response.status();
        // A closure of the policy's may panic, and the handler has run.
        let Ok(verdict) = catch_unwind(AssertUnwindSafe(|| key.verdict(status, &self.policy))) else {
            key.mark_acted();
            drop(slot.close());
            return self.fail(hold, Event::Panicked, Code::HandlerPanicked).await.map_into_right_body();
        };
        key.believe();
        let is_transient = response.extensions().get::<Code>().is_some_and(|code| code.is_transient());
        let verdict = match verdict {
            // Whoever obeys it and tries again would be told the same for as long as it is kept.
            Verdict::Keep | Verdict::KeepWithoutBody if is_transient => Verdict::Back(self.policy.without_answer()),
            verdict => verdict,
        };
        let used = slot.close();
        if let (Hold::Atomic(_), Used::Not(Some(_)), true) = (&hold, &used, status.as_u16() < 400) {
            telemetry::event(Event::AtomicWithoutTx, &self.ask.id);
        }
        match judge(status, verdict, used, key.completed(), self.policy.without_answer()) {
            Course::Keep { transaction, body } => self.keep(hold, key, transaction, response, body).await,
            Course::RollBackAndKeep { transaction, body } => {
                self.roll_back(transaction).await;
                self.keep(hold, key, None, response, body).await
            }
            Course::GiveBack { transaction, how, instead } => {
                self.roll_back(transaction).await;
                let response = match instead {
                    None => response.map_into_left_body(),
                    Some(code) => {
                        if status.as_u16() < 400 {
                            key.mark_acted();
                        }
                        self.refusal(code.into()).map_into_right_body()
                    }
                };
                self.give_back(hold, how, response).await
            }
            Course::Stored { transaction, snapshot } => self.stored(hold, transaction, snapshot, response).await,
            Course::Abandon => {
                telemetry::misconfigured("a handler has kept its IdemTx beyond its own end: drop it before you answer");
                hold.abandon();
                self.refusal(Code::TransactionMisused.into()).map_into_right_body()
            }
        }
    }

    async fn keep<B>(
        &self,
        hold: Hold,
        key: &IdemKey,
        transaction: Option<Transaction>,
        response: HttpResponse<B>,
        with_body: bool,
    ) -> HttpResponse<EitherBody<B>>
    where
        B: MessageBody + 'static,
    {
        let status = response.status();
        let (head, body) = response.into_parts();
        let attempt = hold.attempt();
        let buffered = if with_body && self.policy.on_completed != OnCompleted::Reject {
            snapshot::buffer(body, head.headers(), &self.policy).await
        } else {
            Buffered::Untouched(body)
        };
        let (stored, sent) = match buffered {
            Buffered::Empty(body) => (Some(Default::default()), EitherBody::left(body)),
            Buffered::Whole(bytes) => (Some(bytes.clone()), EitherBody::right(BoxBody::new(bytes))),
            Buffered::Untouched(body) => (None, EitherBody::left(body)),
            Buffered::Streaming(body) => (None, EitherBody::right(body)),
            Buffered::Failed(error) => {
                telemetry::body_failed(&*error);
                self.roll_back(transaction).await;
                let refusal = self.refusal(Code::BodyFailed.into()).map_into_right_body();
                return self.give_back(hold, self.policy.without_answer(), refusal).await;
            }
        };
        let snapshot = ResponseSnapshot::capture(status, head.headers(), stored, &self.policy);
        let Ok(stored) = catch_unwind(AssertUnwindSafe(|| self.policy.stored(snapshot))) else {
            key.mark_acted();
            self.roll_back(transaction).await;
            return self.fail(hold, Event::Panicked, Code::HandlerPanicked).await.map_into_right_body();
        };
        match hold.keep(transaction, stored).await {
            Ended::Landed | Ended::Later => {
                self.report("fresh");
                let mut response = head.set_body(sent);
                self.tell(response.headers_mut(), attempt, self.policy.retention);
                response
            }
            Ended::Lost => self.overtaken().await.map_into_right_body(),
            Ended::Refused(code) => self.refusal(code.into()).map_into_right_body(),
            Ended::Unknown => self.refusal(Code::OutcomeUnknown.into()).map_into_right_body(),
        }
    }

    /// There is no answer of the handler's, and the policy says what becomes of the key.
    pub(crate) async fn fail(&self, hold: Hold, event: Event, code: Code) -> HttpResponse<BoxBody> {
        telemetry::event(event, &self.ask.id);
        let ended = match self.policy.on_failure {
            OnFailure::Store if !code.is_transient() => hold.keep(None, refusal::snapshot(code, &self.policy)).await,
            _ => hold.give_back(code.status(), self.policy.without_answer()).await,
        };
        if ended == Ended::Lost {
            return self.overtaken().await;
        }
        self.report(code.as_str());
        Refusal::new(code).under(&self.policy).error_response()
    }

    async fn give_back<B>(
        &self,
        hold: Hold,
        how: Return,
        response: HttpResponse<EitherBody<B>>,
    ) -> HttpResponse<EitherBody<B>> {
        match hold.give_back(response.status(), how).await {
            Ended::Lost => self.overtaken().await.map_into_right_body(),
            _ => {
                self.report("released");
                response
            }
        }
    }

    /// The handler has completed its key in a transaction, its own or `IdemTx`: what the row says counts.
    async fn stored<B>(
        &self,
        hold: Hold,
        transaction: Option<Transaction>,
        snapshot: ResponseSnapshot,
        response: HttpResponse<B>,
    ) -> HttpResponse<EitherBody<B>> {
        let success = response.status().as_u16() < 400;
        match transaction {
            Some(transaction) if success => {
                // What this says is asked of the row below.
                let _ = transaction.commit_after(&self.policy, async |tx| tx.is_ours().await).await;
            }
            transaction => self.roll_back(transaction).await,
        }
        let Hold::Lease(lease) = hold else {
            return self.refusal(Code::Misconfigured.into()).map_into_right_body();
        };
        match self.engine.look(&self.ask.id, &self.policy).await {
            Ok(Some(row)) if row.owner == lease.owner && row.state == "completed" => {
                let attempt = lease.attempt;
                lease.confirm();
                self.report("fresh");
                let mut response = snapshot.into_response().map_into_right_body();
                self.tell(response.headers_mut(), attempt, self.policy.retention);
                response
            }
            // Rolled back: the row is as the claim left it.
            Ok(Some(row)) if row.owner == lease.owner => {
                let response = if success {
                    telemetry::misconfigured(
                        "a handler answers with success, and the transaction of its complete_in was rolled back",
                    );
                    self.refusal(Code::TransactionMisused.into()).map_into_right_body()
                } else {
                    response.map_into_left_body()
                };
                self.give_back(Hold::Lease(lease), self.policy.without_answer(), response).await
            }
            Ok(_) => {
                lease.confirm();
                self.overtaken().await.map_into_right_body()
            }
            Err(error) => {
                telemetry::store_failed("whether the handler's transaction was committed cannot be told", &error);
                lease.abandon();
                self.refusal(Code::OutcomeUnknown.into()).map_into_right_body()
            }
        }
    }

    async fn roll_back(&self, transaction: Option<Transaction>) {
        if let Some(transaction) = transaction {
            transaction.rollback(&self.policy).await;
        }
    }
}

/// The answer to a request without a key, whose handler may have used a transaction.
pub(crate) async fn settle_keyless<B>(
    policy: &Policy,
    slot: &Slot,
    response: HttpResponse<B>,
) -> HttpResponse<EitherBody<B>> {
    let success = response.status().as_u16() < 400;
    let code = match slot.close() {
        Used::Not(_) => return response.map_into_left_body(),
        Used::Back(transaction) if transaction.has_lost_a_race() => {
            transaction.rollback(policy).await;
            Code::Serialization
        }
        Used::Back(transaction) if success => {
            match transaction.commit_after(policy, async |tx| tx.is_ours().await).await {
                Commit::Done => return response.map_into_left_body(),
                Commit::RolledBack(code) => code,
                Commit::Lost | Commit::EndedByHandler => Code::TransactionMisused,
                Commit::InDoubt(Code::StoreUnavailable) => Code::OutcomeUnknown,
                Commit::InDoubt(code) => code,
            }
        }
        Used::Back(transaction) => {
            transaction.rollback(policy).await;
            return response.map_into_left_body();
        }
        Used::Failed(code, transaction) => {
            if let Some(transaction) = transaction {
                transaction.rollback(policy).await;
            }
            if !success {
                return response.map_into_left_body();
            }
            code
        }
        Used::Kept => Code::TransactionMisused,
    };
    Refusal::new(code).under(policy).error_response().map_into_right_body()
}
