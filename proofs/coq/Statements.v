(* The index: each claim restated with the named formulas of Formulas.v, under a comment that Python reads:
   [id of theory] the claim in words. Met: where its hypotheses are met or measured.
   "exact" succeeds only if the named formula unfolds to the one that was proved; Examples.v meets every
   hypothesis of every claim at least once. *)
From Coq Require Import Reals.
From Coquelicot Require Import Coquelicot.
From LCSB Require Import FinSum Formulas Vectors DescentLemma DescentStep Telescoping
  PLContraction CyclicBound CyclicRate MomentumCoast IdentityPath BiasedDescent
  MomentumStability.
Open Scope R_scope.

(* [T1] One gradient step on an L-smooth function: decrease by at least eta (1 - eta L/2) times the squared gradient, for eta < 2/L.
   Met: exactly on quadratics; L is measured on a network. *)
Theorem claim_descent : forall f0 f1 g2 eta L : R,
  0 < L -> 0 < eta < 2 / L -> 0 <= g2 ->
  f1 <= f0 - eta * g2 + L / 2 * eta ^ 2 * g2 ->
  f1 <= f0 - descent_coeff eta L * g2 /\ f1 <= f0.
Proof. exact descent_step. Qed.

(* [T2] A sufficient decrease c g at every step leaves, among T steps, one with g at most (f0 - fmin)/(c T).
   Met: follows from T1 or from the biased descent below. *)
Theorem claim_telescope : forall (f g : nat -> R) (fstar c : R),
  0 < c -> (forall t, fstar <= f t) -> (forall t, f (S t) <= f t - c * g t) ->
  forall T, (0 < T)%nat ->
  exists t, (t < T)%nat /\ g t <= telescope_bound (f 0%nat) fstar c T.
Proof. exact telescope_witness. Qed.

(* [T3] A contraction by 1 - q at every step gives (1 - q)^T after T steps.
   Met: strongly convex quadratics; the PL constant of a network is not known. *)
Theorem claim_pl : forall (f : nat -> R) (fstar q : R), 0 <= q <= 1 ->
  (forall t, f (S t) - fstar <= (1 - q) * (f t - fstar)) ->
  forall T, f T - fstar <= pl_bound (f 0%nat) fstar q T.
Proof. exact pl_contraction. Qed.

(* [T2] Textbook cycle lemma: block gradients at the start of a cycle against those used inside it, factor 2 (1 + N L^2 eta^2).
   Met: L-smooth loss, exact gradients of the block; L is measured. *)
Theorem claim_cyclic : forall (N : nat) (L eta : R) (s u : nat -> R),
  (forall i, (i < N)%nat ->
     Rabs (s i - u i) <= L * eta * sqrt (psum (fun j => u j ^ 2) N)) ->
  psum (fun i => s i ^ 2) N <= cyclic_factor N L eta * psum (fun j => u j ^ 2) N.
Proof. exact cyclic_one_cycle. Qed.

(* [T6] K idle steps of EMA momentum move a block by -eta m beta (1 - beta^K)/(1 - beta).
   Met: law: holds for idle momentum without decay; AdamW in claim_adamw below. *)
Theorem claim_coast : forall (m x : nat -> R) (eta beta : R) (K : nat),
  beta <> 1 ->
  (forall t, (t < K)%nat -> m (S t) = beta * m t) ->
  (forall t, (t < K)%nat -> x (S t) = x t - eta * m (S t)) ->
  x K = coast_position (x 0%nat) (m 0%nat) eta beta K.
Proof. exact momentum_coast. Qed.

(* [T6] An idle block coasts to a limit: in total -eta m beta/(1 - beta).
   Met: law. *)
Theorem claim_coast_limit : forall (m x : nat -> R) (eta beta : R),
  Rabs beta < 1 ->
  (forall t, m (S t) = beta * m t) ->
  (forall t, x (S t) = x t - eta * m (S t)) ->
  is_lim_seq x (coast_limit (x 0%nat) (m 0%nat) eta beta).
Proof. exact momentum_coast_limit. Qed.

(* [T7] Two residual layers: the true derivative with respect to a is (1 + b) x; the identity surrogate is x.
   Met: law. *)
Theorem claim_true_grad : forall x b a, is_derive (loss x b) a (true_grad_a x b).
Proof. exact true_grad. Qed.

(* [T2] Textbook biased descent: relative error delta of the gradient leaves a decrease of eta ((1 - delta) - L eta (1 + delta)^2/2) |g|^2.
   Met: delta is measured; it is below 1 only for some layers. *)
Theorem claim_biased : forall n (f : vec -> R) (x g gt : vec) (L eta delta : R),
  0 < L -> 0 < eta ->
  (forall y, f y <= f x + dot n g (vsub y x) + L / 2 * nrm n (vsub y x) ^ 2) ->
  nrm n (vsub gt g) <= delta * nrm n g ->
  f (axpy x (- eta) gt) <= f x - biased_coeff eta L delta * nrm n g ^ 2.
Proof. exact biased_descent. Qed.

(* [T2] Textbook step size: with eta < 2 (1 - delta)/(L (1 + delta)^2) the biased step does not ascend.
   Met: delta and L are measured. *)
Theorem claim_biased_step : forall n (f : vec -> R) (x g gt : vec) (L eta delta : R),
  0 < L -> 0 < eta -> 0 <= delta < 1 ->
  (forall y, f y <= f x + dot n g (vsub y x) + L / 2 * nrm n (vsub y x) ^ 2) ->
  nrm n (vsub gt g) <= delta * nrm n g ->
  eta < biased_step_max L delta ->
  f (axpy x (- eta) gt) <= f x /\ (0 < nrm n g -> f (axpy x (- eta) gt) < f x).
Proof. exact biased_descent_stepsize. Qed.

(* [T5] EMA momentum on curvature lam: both roots lie inside the unit circle exactly when 0 < eta lam < 2 (1 + beta)/(1 - beta).
   Met: exact on quadratics. *)
Theorem claim_stable : forall beta eta lam, 0 <= beta < 1 ->
  ((forall z, is_root (momentum_trace beta eta lam) beta z -> Cmod z < 1)
   <-> 0 < eta * lam < momentum_edge beta).
Proof. exact momentum_stable_iff. Qed.
