(* The index: each claim restated with the named formulas of Formulas.v, under a comment that Python reads:
   [id of theory] the claim in words. Met: where its hypotheses are met or measured.
   "exact" succeeds only if the named formula unfolds to the one that was proved; Examples.v meets every
   hypothesis of every claim at least once. *)
From Coq Require Import Reals.
From Coquelicot Require Import Coquelicot.
From LCSB Require Import FinSum Formulas Vectors DescentLemma DescentStep Telescoping
  PLContraction CyclicBound CyclicRate MomentumCoast IdentityPath BiasedDescent
  MomentumStability Blocks BlockDescent Quadratic BlockCycle FrozenMomentum FrozenCycle BiasedStep BiasedCyclic
  TextbookCyclic PLCyclic PLRandom IdleMomentum IdleCycle IdleRate IdleLimit
  AdamWIdle AdamWDrift Pulse UncoupledLimit GradientFlow LoraSmooth TwoBlocks NoiseFloor Reach Weyl
  AngleStep CyclicMass CyclicRateMomentum MomentumDecay MomentumLimit.
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
   Met: law: holds for idle momentum without decay; AdamW has its own law, claim_adamw_idle. *)
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

(* ---- Vectors in blocks. Every assumption on f, in one place: grad is its gradient, Lipschitz with constant L,
   and along block i, the rest fixed, with constant Li i <= Lmax. *)
Definition smooth_in_blocks n blk f grad (Li : nat -> R) (Lmax L : R) : Prop :=
  is_gradient n f grad /\ block_lipschitz n blk grad Li /\ (forall i, Li i <= Lmax) /\ 0 < Lmax /\
  0 <= L /\ lipschitz n grad L.

(* [T1] Block descent from the gradient alone: a step on block i lowers f by at least eta (1 - eta L_i/2) times its squared gradient.
   Met: quadratics exactly; L_i is measured on a network. *)
Theorem claim_block_descent : forall n blk f grad Li i x eta,
  is_gradient n f grad -> block_lipschitz n blk grad Li ->
  f (axpy x (- eta) (proj blk i (grad x)))
    <= f x - descent_coeff eta (Li i) * nrm n (proj blk i (grad x)) ^ 2.
Proof. exact block_descent. Qed.

(* [T1] On a quadratic the block step is an equality along an eigenvector of the block (always for one coordinate): f decreases exactly when 0 < eta < 2/L_i.
   Met: every quadratic with blocks of one coordinate. *)
Theorem claim_quadratic_limit : forall n blk A i x eta Li, (forall i j, A i j = A j i) -> 0 < Li ->
  proj blk i (mv n A (proj blk i (mv n A x))) = (fun j => Li * proj blk i (mv n A x) j) ->
  0 < nrm n (proj blk i (mv n A x)) ->
  quad n A (axpy x (- eta) (proj blk i (mv n A x)))
    = quad n A x - descent_coeff eta Li * nrm n (proj blk i (mv n A x)) ^ 2 /\
  (quad n A (axpy x (- eta) (proj blk i (mv n A x))) < quad n A x <-> 0 < eta < 2 / Li).
Proof.
  intros n blk A i x eta Li HA HL HE Hg. destruct (quad_block_exact n blk A i x eta Li HA HL HE) as [E D].
  split; [exact E|apply D, Hg].
Qed.

(* [T2] Biased block step, sharp: relative error delta leaves a decrease of eta c |g|^2, c the smaller of two products.
   Met: delta is measured by layer; below 1 only for some layers in identity mode; 0 in exact mode. *)
Theorem claim_biased_block : forall n blk f grad Li Lmax L eta delta i x gt,
  smooth_in_blocks n blk f grad Li Lmax L -> 0 < eta -> 0 <= delta <= 1 ->
  nrm n (proj blk i (vsub gt (grad x))) <= delta * nrm n (proj blk i (grad x)) ->
  f (axpy x (- eta) (proj blk i gt))
    <= f x - eta * sharp_constant (eta * Lmax) delta * nrm n (proj blk i (grad x)) ^ 2.
Proof.
  intros n blk f grad Li Lmax L eta delta i x gt [G [B [H _]]] He Hd Hb.
  apply (biased_block_step n blk f grad Li Lmax eta delta i x gt); auto using block_upper_bound.
Qed.

(* [T2] The sharp constant is positive exactly when eta L_max (1 + delta) < 2.
   Met: law. *)
Theorem claim_sharp_positive : forall a delta, 0 <= delta < 1 -> 0 < a ->
  (0 < sharp_constant a delta <-> a * (1 + delta) < 2).
Proof. exact sharp_positive. Qed.

(* [T2] The limit is attained: on x^2/2 a surrogate of relative error delta ascends as soon as eta (1 + delta) > 2.
   Met: law. *)
Theorem claim_sharp_attained : forall eta delta x : R, 0 <= delta -> x <> 0 -> 2 < eta * (1 + delta) ->
  x ^ 2 / 2 < (x - eta * ((1 + delta) * x)) ^ 2 / 2.
Proof. exact sharp_attained. Qed.

(* [T2] One cycle, sharp: the full gradient at its start against the block gradients met on the way, factor (1 + sqrt(p - 1) L eta (1 + delta))^2; any order that visits each block once.
   Met: cyclic, reversed, interleaved and shuffled schedules; L and delta are measured. *)
Theorem claim_biased_one_cycle : forall n blk b grad L eta delta x gt, 0 < eta -> 0 <= delta < 1 ->
  biased_run n blk b grad eta delta x gt -> 0 <= L -> lipschitz n grad L ->
  forall q s, visits_once n blk b s (S q) ->
  nrm n (grad (x s)) ^ 2 <= cycle_factor L eta delta q
    * psum (fun i => nrm n (proj blk (b (s + i)%nat) (grad (x (s + i)%nat))) ^ 2) (S q).
Proof. exact biased_one_cycle. Qed.

(* [T2] K cycles of biased cyclic block descent, sharp: the sum of squared full gradients at the cycle starts, for eta < 2/(L_max (1 + delta)), f not convex.
   Met: exact mode with delta = 0; identity mode only where delta is measured below 1. *)
Theorem claim_biased_cyclic : forall n q blk b f grad Li Lmax L eta delta fmin x gt K,
  smooth_in_blocks n blk f grad Li Lmax L -> 0 < eta -> 0 <= delta < 1 -> eta * Lmax * (1 + delta) < 2 ->
  (forall y, fmin <= f y) -> biased_run n blk b grad eta delta x gt ->
  (forall k, visits_once n blk b (k * S q) (S q)) ->
  psum (fun k => nrm n (grad (x (k * S q)%nat)) ^ 2) K <= cycle_bound (f (x 0%nat)) fmin Lmax L eta delta q.
Proof.
  intros n q blk b f grad Li Lmax L eta delta fmin x gt K [G [B [H [HL [L0 Hl]]]]] He Hd Hs Hf Hr Hv.
  apply (biased_cyclic n blk b f grad Li Lmax L eta delta fmin x gt); auto using block_upper_bound.
Qed.

(* [T2] The same in the weaker textbook form, factor 2 (1 + p L^2 eta^2 (1 + delta)^2).
   Met: as above, and the textbook constant is positive. *)
Theorem claim_textbook_cyclic : forall n q blk b f grad Li Lmax L eta delta fmin x gt K,
  smooth_in_blocks n blk f grad Li Lmax L -> 0 < eta -> 0 <= delta < 1 -> (forall y, fmin <= f y) ->
  biased_run n blk b grad eta delta x gt -> (forall k, visits_once n blk b (k * S q) (S q)) ->
  0 < (1 - delta) - Lmax * eta * (1 + delta) ^ 2 / 2 ->
  psum (fun k => nrm n (grad (x (k * S q)%nat)) ^ 2) K
    <= textbook_bound (f (x 0%nat)) fmin Lmax L eta delta (S q).
Proof.
  intros n q blk b f grad Li Lmax L eta delta fmin x gt K [G [B [H [HL [L0 Hl]]]]] He Hd Hf Hr Hv Hc.
  apply (textbook_cyclic n q blk b f grad Li Lmax L eta delta fmin x gt); auto using block_upper_bound.
Qed.

(* [T3] Under the PL inequality K biased cycles contract f - fmin by 1 - q each, q = 2 mu eta c/(1 + sqrt(p - 1) L eta (1 + delta))^2.
   Met: strongly convex quadratics; the PL constant of a network is not known. *)
Theorem claim_pl_cyclic : forall n q blk b f grad Li Lmax L eta delta mu fmin x gt K,
  smooth_in_blocks n blk f grad Li Lmax L -> 0 < eta -> 0 <= delta < 1 -> eta * Lmax * (1 + delta) < 2 ->
  (forall y, fmin <= f y) -> pl n f grad mu fmin -> biased_run n blk b grad eta delta x gt ->
  (forall k, visits_once n blk b (k * S q) (S q)) ->
  f (x (K * S q)%nat) - fmin <= (1 - pl_cycle_rate mu Lmax L eta delta q) ^ K * (f (x 0%nat) - fmin).
Proof.
  intros n q blk b f grad Li Lmax L eta delta mu fmin x gt K [G [B [H [HL [L0 Hl]]]]] He Hd Hs Hf Hp Hr Hv.
  apply (pl_cyclic n q blk b f grad Li Lmax L eta delta mu fmin x gt); auto using block_upper_bound.
Qed.

(* [T3] Random blocks, exact gradients: the mean of f over all equally likely runs contracts by 1 - 2 mu eta (1 - eta L_max/2)/p a step.
   Met: strongly convex quadratics under the random schedule. *)
Theorem claim_pl_random : forall n p blk f grad Li Lmax L eta mu fmin,
  (0 < p)%nat -> (forall j, (j < n)%nat -> (blk j < p)%nat) ->
  smooth_in_blocks n blk f grad Li Lmax L -> 0 < eta -> eta * Lmax < 2 ->
  pl n f grad mu fmin -> 0 <= pl_random_rate mu Lmax eta p <= 1 ->
  forall T x, expected p blk f grad eta T x - fmin <= (1 - pl_random_rate mu Lmax eta p) ^ T * (f x - fmin).
Proof.
  intros n p blk f grad Li Lmax L eta mu fmin Hp Hb [G [B [H _]]] He Hs Hpl Hr.
  apply (pl_random n p blk f grad Li Lmax eta mu fmin); auto using block_upper_bound.
Qed.

(* [T6] Change of variable: in z = x - eta beta/(1 - beta) m, EMA momentum with moving idle blocks is plain block descent with gradients read at x.
   Met: law: SGD with EMA momentum, idle policy momentum, no decay. *)
Theorem claim_change_of_variable : forall blk b grad eta beta x m, 0 <= beta < 1 ->
  idle_momentum blk b grad eta beta x m -> forall t,
  shadow eta beta x m (S t) = axpy (shadow eta beta x m t) (- eta) (proj blk (b t) (grad (x t))).
Proof. exact change_of_variable. Qed.

(* [T6] Descent inequality with momentum: the displaced gradient costs at most eta^2 beta L/(1 - beta) |m| |g|.
   Met: L-smooth f, exact gradients; L is measured. *)
Theorem claim_momentum_descent : forall n blk b f grad Li Lmax L eta beta x m,
  smooth_in_blocks n blk f grad Li Lmax L -> 0 < eta -> 0 <= beta < 1 ->
  idle_momentum blk b grad eta beta x m -> forall t,
  let g := proj blk (b t) (grad (x t)) in
  f (shadow eta beta x m (S t)) <= f (shadow eta beta x m t) - descent_coeff eta Lmax * nrm n g ^ 2
    + eta * (eta * beta / (1 - beta) * L) * (nrm n (m t) * nrm n g).
Proof.
  intros n blk b f grad Li Lmax L eta beta x m [G [B [H [HL [L0 Hl]]]]] He Hb Hr t.
  apply (momentum_descent n blk b f grad Li Lmax L eta beta x m); auto using block_upper_bound.
Qed.

(* [T6] Convergence with idle momentum, any order: the sum of squared block gradients while 1 - eta L_max/2 - eta beta L/(1 - beta) > 0.
   Met: exact mode, SGD with EMA momentum; L and L_max are measured. *)
Theorem claim_idle_sum : forall n blk b f grad Li Lmax L eta beta fmin x m T,
  smooth_in_blocks n blk f grad Li Lmax L -> 0 < eta -> 0 <= beta < 1 ->
  idle_momentum blk b grad eta beta x m -> m 0%nat = (fun _ => 0) -> (forall y, fmin <= f y) ->
  0 < idle_bracket Lmax L eta beta ->
  psum (fun t => nrm n (proj blk (b t) (grad (x t))) ^ 2) T <= idle_bound (f (x 0%nat)) fmin Lmax L eta beta.
Proof.
  intros n blk b f grad Li Lmax L eta beta fmin x m T [G [B [H [HL [L0 Hl]]]]] He Hb Hr Hm Hf Hp.
  apply (idle_sum n blk b f grad Li Lmax L eta beta fmin x m); auto using block_upper_bound.
Qed.

(* [T6] The simple corollary: eta at most 1/(2 L_max) and (1 - beta)/(2 beta L) gives 4 (f0 - fmin)/eta.
   Met: as above. *)
Theorem claim_idle_simple : forall n blk b f grad Li Lmax L eta beta fmin x m T,
  smooth_in_blocks n blk f grad Li Lmax L -> 0 < eta -> 0 <= beta < 1 ->
  idle_momentum blk b grad eta beta x m -> m 0%nat = (fun _ => 0) -> (forall y, fmin <= f y) ->
  2 * eta * Lmax <= 1 -> 2 * eta * beta * L <= 1 - beta ->
  psum (fun t => nrm n (proj blk (b t) (grad (x t))) ^ 2) T <= idle_simple_bound (f (x 0%nat)) fmin eta.
Proof.
  intros n blk b f grad Li Lmax L eta beta fmin x m T [G [B [H [HL [L0 Hl]]]]] He Hb Hr Hm Hf H1 H2.
  apply (idle_simple n blk b f grad Li Lmax L eta beta fmin x m); auto using block_upper_bound.
Qed.

(* [T6] Cycle average with idle momentum: full gradients at the cycle starts, factor (1 + eta L sqrt(p (p - 1)/2))^2 (kappa = 1).
   Met: as above, schedules that visit each block once a cycle. *)
Theorem claim_idle_cycles : forall n p blk b f grad Li Lmax L eta beta fmin x m K,
  smooth_in_blocks n blk f grad Li Lmax L -> 0 < eta -> 0 <= beta < 1 ->
  idle_momentum blk b grad eta beta x m -> m 0%nat = (fun _ => 0) -> (forall y, fmin <= f y) ->
  0 < idle_bracket Lmax L eta beta -> (forall k, visits_once n blk b (k * p) p) ->
  psum (fun k => nrm n (grad (x (k * p)%nat)) ^ 2) K <= idle_cycle_bound (f (x 0%nat)) fmin Lmax L eta beta p.
Proof.
  intros n p blk b f grad Li Lmax L eta beta fmin x m K [G [B [H [HL [L0 Hl]]]]] He Hb Hr Hm Hf Hp Hv.
  apply (idle_cycles n blk b f grad Li Lmax L eta beta fmin x m); auto using block_upper_bound.
Qed.

(* [T6b] Frozen idle momentum: f + eta beta/(2 (1 - beta)) |m|^2 falls by at least eta (1 - eta L_i/2) |m_i'|^2 at every step; any order, any beta < 1, f not convex.
   Met: exact mode, SGD with EMA momentum, idle policy frozen; L_i is measured. *)
Theorem claim_frozen_energy : forall n blk b f grad Li eta beta x m,
  is_gradient n f grad -> block_lipschitz n blk grad Li -> 0 < eta -> 0 <= beta < 1 ->
  frozen_momentum blk b grad eta beta x m -> forall t,
  f (x (S t)) + frozen_energy_weight eta beta * nrm n (m (S t)) ^ 2
    <= f (x t) + frozen_energy_weight eta beta * nrm n (m t) ^ 2
       - descent_coeff eta (Li (b t)) * nrm n (proj blk (b t) (m (S t))) ^ 2.
Proof.
  intros n blk b f grad Li eta beta x m G B He Hb Hr t.
  apply (frozen_energy n blk b f grad Li eta beta x m); auto using block_upper_bound.
Qed.

(* [T6b] Summed: squared block gradients add up to at most ((1 + beta)/(1 - beta))^2 (f0 - fmin)/(eta (1 - eta L_max/2)), for every eta < 2/L_max.
   Met: as above. *)
Theorem claim_frozen_sum : forall n blk b f grad Li Lmax L eta beta fmin x m T,
  smooth_in_blocks n blk f grad Li Lmax L -> 0 < eta -> 0 <= beta < 1 ->
  frozen_momentum blk b grad eta beta x m -> nrm n (m 0%nat) = 0 -> (forall y, fmin <= f y) -> eta * Lmax < 2 ->
  psum (fun t => nrm n (proj blk (b t) (grad (x t))) ^ 2) T <= frozen_bound (f (x 0%nat)) fmin Lmax eta beta.
Proof.
  intros n blk b f grad Li Lmax L eta beta fmin x m T [G [B [H [HL [L0 Hl]]]]] He Hb Hr Hm Hf Hp.
  apply (frozen_sum n blk b f grad Li Lmax eta beta fmin x m); auto using block_upper_bound.
Qed.

(* [T6b] Cycle average: full gradients at the starts of K cycles, factor ((1 + beta)/(1 - beta) + eta L sqrt(p - 1))^2.
   Met: as above, schedules that visit each block once a cycle. *)
Theorem claim_frozen_cycles : forall n q blk b f grad Li Lmax L eta beta fmin x m K,
  smooth_in_blocks n blk f grad Li Lmax L -> 0 < eta -> 0 <= beta < 1 ->
  frozen_momentum blk b grad eta beta x m -> nrm n (m 0%nat) = 0 -> (forall y, fmin <= f y) -> eta * Lmax < 2 ->
  (forall k, visits_once n blk b (k * S q) (S q)) ->
  psum (fun k => nrm n (grad (x (k * S q)%nat)) ^ 2) K
    <= frozen_cycle_bound (f (x 0%nat)) fmin Lmax L eta beta q.
Proof.
  intros n q blk b f grad Li Lmax L eta beta fmin x m K [G [B [H [HL [L0 Hl]]]]] He Hb Hr Hm Hf Hp Hv.
  apply (frozen_cycles n q blk b f grad Li Lmax L eta beta fmin x m K); auto using block_upper_bound.
Qed.

(* [T5] Idle momentum does not keep block descent's limit: a positive definite 3 x 3 matrix with L_max = 1, three blocks, eta = 27/14 < 2, beta = 3/10, m = 0 at the start, unbounded iterates.
   Met: by construction; frozen momentum converges on the same problem (claim_frozen_cycles in Examples.v). *)
Theorem claim_idle_limit : forall b x m,
  (forall k i, (i < 3)%nat -> b (k * 3 + i)%nat = i) ->
  idle_momentum (fun j => j) b (mv 3 witness) (27 / 14) (3 / 10) x m ->
  x 0%nat = start -> m 0%nat = (fun _ => 0) ->
  forall B, exists t, B < nrm 3 (x t).
Proof. exact idle_momentum_unbounded. Qed.

(* ---- Momentum of one coordinate, AdamW, identity mode, LoRA, and the rest *)

(* [T4] Two coupled coordinates ((1, a), (a, 1)), one at a time: both roots of the cycle map lie inside the unit circle exactly when 0 < eta < 2 = 2/L_max.
   Met: exact on quadratics; larger problems numerically, by the spectral radius of the cycle map. *)
Theorem claim_two_blocks : forall a eta, a ^ 2 < 1 ->
  ((forall z, is_root (two_block_trace a eta) ((1 - eta) ^ 2) z -> Cmod z < 1) <-> 0 < eta < 2).
Proof. exact two_blocks. Qed.

(* [T4] Full gradient descent on the same matrix contracts exactly when 0 < eta < 2/(1 + a).
   Met: exact on quadratics. *)
Theorem claim_two_blocks_full : forall a eta, 0 <= a < 1 ->
  (Rabs (1 - eta * (1 + a)) < 1 /\ Rabs (1 - eta * (1 - a)) < 1 <-> 0 < eta < 2 / (1 + a)).
Proof. exact two_blocks_full. Qed.

(* [T5] An uncoupled block visited once in p steps with idle momentum: one cycle is exactly one EMA step with momentum beta^p.
   Met: law for one coordinate of fixed curvature; coupled blocks only by the cycle map (T4). *)
Theorem claim_cycle_is_ema : forall x m eta beta lam p, (0 < p)%nat -> 0 <= beta < 1 ->
  visited_block x m eta beta lam p -> forall k,
  x (S k * p)%nat = x (k * p)%nat - eta * cycle_momentum m beta p k /\
  cycle_momentum m beta p (S k)
    = beta ^ p * cycle_momentum m beta p k + (1 - beta ^ p) * (lam * x (S k * p)%nat).
Proof. exact cycle_is_ema. Qed.

(* [T5] Its limit, as an equivalence: all roots inside the unit circle exactly when 0 < eta lam < 2 (1 + beta^p)/(1 - beta^p).
   Met: uncoupled quadratics. *)
Theorem claim_uncoupled_limit : forall beta eta lam p, 0 <= beta < 1 -> (0 < p)%nat ->
  ((forall z, is_root (momentum_trace (beta ^ p) eta lam) (beta ^ p) z -> Cmod z < 1)
   <-> 0 < eta * lam < uncoupled_edge beta p).
Proof. exact uncoupled_limit. Qed.

(* [T6] One gradient pulse g moves x by -eta (1 - beta) beta^k g at the k-th step after it.
   Met: law: SGD with EMA momentum, no decay. *)
Theorem claim_pulse : forall x m eta beta g, pulse x m eta beta g ->
  forall k, x (S k) = x k - eta * (1 - beta) * beta ^ k * g /\ x k = pulse_position (x 0%nat) eta beta g k.
Proof. exact pulse_response. Qed.

(* [T6] In total the pulse moves x by exactly -eta g: EMA momentum delays the step and does not change it.
   Met: law. *)
Theorem claim_pulse_total : forall x m eta beta g, 0 <= beta < 1 -> pulse x m eta beta g ->
  is_lim_seq x (x 0%nat - eta * g).
Proof. exact pulse_total. Qed.

(* [T6] AdamW, k idle steps after step s in closed form, with decoupled decay and torch's place of eps.
   Met: law; the trainer's optimiser states are compared with it. *)
Theorem claim_adamw_idle : forall x m v eta lam beta1 beta2 eps s k,
  adamw_idle x m v eta lam beta1 beta2 eps s ->
  x k = (1 - eta * lam) ^ k * x 0%nat - eta * psum (fun i => (1 - eta * lam) ^ (k - S i)
    * adamw_idle_step (m 0%nat) (v 0%nat) beta1 beta2 eps s (S i)) k.
Proof. exact adamw_idle_closed. Qed.

(* [T7] Skipping layers of a backward chain of linear maps I + F_j, |F_j| at most l_j: the bias is at most the product of 1 + l_j over all layers less that over the kept ones.
   Met: l_j would have to be measured on a network; the cosine is measured instead. *)
Theorem claim_skip_bias : forall (V : NormedModule R_AbsRing) (F : nat -> V -> V) (l : nat -> R),
  (forall j v w, F j (minus v w) = minus (F j v) (F j w)) -> (forall j v, norm (F j v) <= l j * norm v) ->
  (forall j, 0 <= l j) -> forall kept n v,
  norm (minus (chain V F (fun _ => true) n v) (chain V F kept n v))
    <= (pprod (fun j => 1 + (if true then l j else 0)) n - pprod (fun j => 1 + (if kept j then l j else 0)) n) * norm v.
Proof. exact skip_bias. Qed.

(* [T7] All layers skipped: the bias is at most the product of 1 + l_j less 1, and that is at most exp of the sum of l_j less 1.
   Met: as above. *)
Theorem claim_identity_bias : forall (V : NormedModule R_AbsRing) (F : nat -> V -> V) (l : nat -> R),
  (forall j v w, F j (minus v w) = minus (F j v) (F j w)) -> (forall j v, norm (F j v) <= l j * norm v) ->
  (forall j, 0 <= l j) -> forall n v,
  norm (minus (chain V F (fun _ => true) n v) v) <= (pprod (fun j => 1 + l j) n - 1) * norm v /\
  pprod (fun j => 1 + l j) n - 1 <= exp (psum l n) - 1.
Proof. exact identity_bias. Qed.

(* [T7] Gradient flow: if every l_j is below 1, at least the product of 1 - l_j of the top gradient's norm arrives.
   Met: as above; nothing is guaranteed where some l_j is 1 or more. *)
Theorem claim_gradient_flow : forall (V : NormedModule R_AbsRing) (F : nat -> V -> V) (l : nat -> R),
  (forall j v, norm (F j v) <= l j * norm v) -> (forall j, 0 <= l j) -> forall n v, (forall j, l j < 1) ->
  pprod (fun j => 1 - l j) n * norm v <= norm (chain V F (fun _ => true) n v).
Proof. exact gradient_flow. Qed.

(* [T7] Identity mode is not block descent: for b below -1 a step along the surrogate raises the loss of two residual layers.
   Met: law, by construction. *)
Theorem claim_identity_ascends : forall x a b eta, x <> 0 -> b < -1 -> 0 < eta ->
  loss x b a < loss x b (a - eta * x).
Proof. exact identity_ascends. Qed.

(* [T8] Curvature of a LoRA block: the second-derivative form is at most lambda (|X|^2 + |Y|^2), for matrices in any norms with spectral bounds a, b and |G| at most gamma.
   Met: L_W, a, b and |G| are measured; that the form is the second derivative is proved for scalars only. *)
Theorem claim_lora_block : forall (VX VY VW : NormedModule R_AbsRing) (BX : VX -> VW) (YA : VY -> VW)
  (H : VW -> R) (GYX : VY -> VX -> R) (LW s a b gamma : R), 0 <= LW -> 0 <= s -> 0 <= a -> 0 <= b ->
  (forall w, H w <= LW * norm w ^ 2) ->
  (forall X, norm (BX X) <= b * norm X) -> (forall Y, norm (YA Y) <= a * norm Y) ->
  (forall Y X, Rabs (GYX Y X) <= gamma * (norm Y * norm X)) ->
  forall X Y, H (scal s (plus (BX X) (YA Y))) + 2 * s * GYX Y X
    <= lora_curvature (s ^ 2 * LW) a b (s * gamma) * (norm X ^ 2 + norm Y ^ 2).
Proof. exact lora_block. Qed.

(* [T8] The bound is attained: some unit (u, v) gives the two-dimensional form exactly lambda.
   Met: law. *)
Theorem claim_lora_attained : forall c a b sG, exists u v, u ^ 2 + v ^ 2 = 1 /\
  lora_form c a b sG u v = lora_curvature c a b sG.
Proof. exact form_attained. Qed.

(* [T8] Where the form comes from: the second derivative of f (W + s (B + t Y)(A + t X)) at t = 0, one-by-one factors.
   Met: law, for scalars. *)
Theorem claim_lora_derivative : forall (f f1 f2 : R -> R) (W s A B X Y : R),
  (forall w, is_derive f w (f1 w)) -> (forall w, is_derive f1 w (f2 w)) ->
  let w := fun t => W + s * ((B + t * Y) * (A + t * X)) in
  let phi1 := fun t => f1 (w t) * (s * (Y * (A + t * X) + (B + t * Y) * X)) in
  (forall t, is_derive (fun t => f (w t)) t (phi1 t)) /\
  is_derive phi1 0 (f2 (W + s * (B * A)) * (s * (B * X + Y * A)) ^ 2 + 2 * s * (f1 (W + s * (B * A)) * (Y * X))).
Proof. exact lora_second_derivative. Qed.

(* [T9] Steady movement per cycle of p steps under AdamW, gradient 1 once a cycle, idle momentum, in units of eta.
   Met: constant gradient, eps = 0, decay 0, t large; torch's optimiser is compared with it. *)
Theorem claim_adamw_drift : forall beta1 beta2 p m v,
  0 <= beta1 < 1 -> 0 < beta2 < 1 -> beta1 <> sqrt beta2 -> (0 < p)%nat ->
  m = beta1 ^ p * m + (1 - beta1) -> v = beta2 ^ p * v + (1 - beta2) ->
  psum (fun k => beta1 ^ k * m / sqrt (beta2 ^ k * v)) p = adamw_drift_per_cycle beta1 beta2 p.
Proof. exact adamw_drift. Qed.

(* [T9] It tends to sqrt p as beta2 tends to 1 from below.
   Met: law; at beta2 = 0.999 within 0.1 percent for p up to 8. *)
Theorem claim_drift_limit : forall beta1 p, 0 <= beta1 < 1 -> (0 < p)%nat ->
  filterlim (fun beta2 => adamw_drift_per_cycle beta1 beta2 p) (at_left 1) (locally (sqrt (INR p))).
Proof. exact drift_limit. Qed.

(* [T10] Noise floor of one coordinate under EMA momentum: every stationary second moment has this variance of x.
   Met: noisy quadratics; coupled problems numerically by the Lyapunov equation. *)
Theorem claim_noise_floor : forall eta beta lam s2 pxx pxm pmm, 0 < eta -> 0 <= beta < 1 -> 0 < lam ->
  eta * (1 - beta) * lam < 2 * (1 + beta) -> stationary eta beta lam s2 pxx pxm pmm ->
  pxx = noise_variance eta beta lam s2.
Proof. exact noise_floor. Qed.

(* [T11] A fixed perturbation E of the Hessian moves the top curvature by at most its size (Weyl).
   Met: law at one point; the size of NF4's error is computed numerically, not proved. *)
Theorem claim_weyl : forall n H E l l' e, top_curvature n H l ->
  top_curvature n (fun i j => H i j + E i j) l' ->
  (forall v, Rabs (dot n v (mv n E v)) <= e * nrm n v ^ 2) -> Rabs (l' - l) <= e.
Proof. exact weyl. Qed.

(* [T12] Exact mode, equal contiguous blocks: backward reaches (1 + 1/p)/2 of the layers on average over a cycle.
   Met: law; seconds and bytes are measured. *)
Theorem claim_reach : forall p, (0 < p)%nat ->
  psum (fun j => 1 - INR j / INR p) p / INR p = reach_mean p.
Proof. exact reach_contiguous. Qed.

(* [T12] Interleaved blocks: backward reaches 1 - (p - 1)/(2 N) of the layers on average.
   Met: law. *)
Theorem claim_reach_interleaved : forall p N, (0 < p <= N)%nat ->
  psum (fun j => 1 - INR j / INR N) p / INR p = reach_interleaved_mean p N.
Proof. exact reach_interleaved. Qed.

(* [T12] The layers' speed-up in exact mode lies between 1 and 2 p.
   Met: law; r_in and r_ad are measured. *)
Theorem claim_exact_speedup : forall r_in r_ad p, 0 <= r_in -> 0 <= r_ad -> 1 <= p ->
  1 <= exact_layer_speedup r_in r_ad p < 2 * p.
Proof. exact exact_speedup. Qed.

(* [T2] In angles: with |g~| = rho |g| and cosine c the step lowers f by at least eta rho (c - eta L_i rho/2) |g|^2.
   Met: cosine and rho are measured by layer, over the adapter parameters. *)
Theorem claim_angle : forall n blk f grad Li eta rho cosine i x gt,
  is_gradient n f grad -> block_lipschitz n blk grad Li ->
  nrm n (proj blk i gt) = rho * nrm n (proj blk i (grad x)) ->
  dot n (proj blk i (grad x)) (proj blk i gt) = cosine * (nrm n (proj blk i (grad x)) * nrm n (proj blk i gt)) ->
  f (axpy x (- eta) (proj blk i gt)) <= f x - angle_coeff eta (Li i) rho cosine * nrm n (proj blk i (grad x)) ^ 2.
Proof. intros. apply angle_step; auto using block_upper_bound. Qed.

(* [T2] That is a descent exactly for eta < 2 cos/(L_i rho).
   Met: law. *)
Theorem claim_angle_limit : forall eta rho cosine L, 0 < eta -> 0 < rho -> 0 < L ->
  (0 < angle_coeff eta L rho cosine <-> eta < angle_step_max L rho cosine).
Proof. exact angle_limit. Qed.

(* [T6] In cyclic order the momenta hold at most kappa^2 = (1 - beta)(1 + beta^p)/((1 + beta)(1 - beta^p)) of the squared gradients.
   Met: law: EMA momentum, idle policy momentum, blocks 0, 1, ..., p - 1 in turn. *)
Theorem claim_coherence : forall n p blk b grad eta beta x m, (0 < p)%nat ->
  (forall j, (j < n)%nat -> (blk j < p)%nat) -> (forall t, b t = Nat.modulo t p) -> 0 <= beta < 1 ->
  idle_momentum blk b grad eta beta x m -> m 0%nat = (fun _ => 0) -> forall T,
  psum (fun t => nrm n (m t) ^ 2) T
    <= coherence_squared beta p * psum (fun t => nrm n (proj blk (b t) (grad (x t))) ^ 2) T.
Proof. exact coherent_mass. Qed.

(* [T6] Convergence with idle momentum in cyclic order, with that kappa.
   Met: exact mode, cyclic schedule, SGD with EMA momentum; L and L_max are measured. *)
Theorem claim_idle_sum_cyclic : forall n p blk b f grad Li Lmax L eta beta fmin x m T,
  smooth_in_blocks n blk f grad Li Lmax L -> 0 < eta -> 0 <= beta < 1 ->
  idle_momentum blk b grad eta beta x m -> m 0%nat = (fun _ => 0) -> (forall y, fmin <= f y) ->
  (0 < p)%nat -> (forall j, (j < n)%nat -> (blk j < p)%nat) -> (forall t, b t = Nat.modulo t p) ->
  0 < cyclic_bracket Lmax L eta beta p ->
  psum (fun t => nrm n (proj blk (b t) (grad (x t))) ^ 2) T
    <= cyclic_idle_bound (f (x 0%nat)) fmin Lmax L eta beta p.
Proof.
  intros n p blk b f grad Li Lmax L eta beta fmin x m T [G [B [H [HL [L0 Hl]]]]] He Hb Hr Hm Hf Hp Hblk Hc P.
  apply (idle_sum_cyclic n p blk b f grad Li Lmax L eta beta fmin x m); auto using block_upper_bound.
Qed.

(* [T6] Cycle average in cyclic order, with that kappa.
   Met: as above. *)
Theorem claim_idle_cycles_cyclic : forall n p blk b f grad Li Lmax L eta beta fmin x m K,
  smooth_in_blocks n blk f grad Li Lmax L -> 0 < eta -> 0 <= beta < 1 ->
  idle_momentum blk b grad eta beta x m -> m 0%nat = (fun _ => 0) -> (forall y, fmin <= f y) ->
  (0 < p)%nat -> (forall j, (j < n)%nat -> (blk j < p)%nat) -> (forall t, b t = Nat.modulo t p) ->
  0 < cyclic_bracket Lmax L eta beta p ->
  psum (fun k => nrm n (grad (x (k * p)%nat)) ^ 2) K
    <= cyclic_idle_cycle_bound (f (x 0%nat)) fmin Lmax L eta beta p.
Proof.
  intros n p blk b f grad Li Lmax L eta beta fmin x m K [G [B [H [HL [L0 Hl]]]]] He Hb Hr Hm Hf Hp Hblk Hc P.
  apply (idle_cycles_cyclic n p blk b f grad Li Lmax L eta beta fmin x m); auto using block_upper_bound.
Qed.

(* [T7] All layers skipped, every l_j below 1: the bias in units of the true gradient is at most 1 over the product of 1 - l_j, less 1.
   Met: l_j would have to be measured on a network; the cosine is measured instead. *)
Theorem claim_relative_bias : forall (V : NormedModule R_AbsRing) (F : nat -> V -> V) (l : nat -> R),
  (forall j v, norm (F j v) <= l j * norm v) -> (forall j, 0 <= l j) -> forall n v, (forall j, l j < 1) ->
  norm (minus v (chain V F (fun _ => true) n v))
    <= (/ pprod (fun j => 1 - l j) n - 1) * norm (chain V F (fun _ => true) n v).
Proof. exact relative_bias. Qed.

(* [T8] The simpler bound c (a^2 + b^2) + s |G| is never smaller, and equal at a = b.
   Met: as claim_lora_block. *)
Theorem claim_lora_simple : forall c a b sG, 0 <= c -> 0 <= sG ->
  lora_curvature c a b sG <= lora_curvature_simple c a b sG /\
  (a = b -> 0 <= a -> lora_curvature c a b sG = lora_curvature_simple c a b sG).
Proof. exact simple_above. Qed.

(* [T5] In iterates: EMA momentum on curvature lam goes to 0 from every start exactly when 0 < eta lam < 2 (1 + beta)/(1 - beta).
   Met: quadratics; a network's curvature is measured and changes. *)
Theorem claim_ema_limit : forall eta beta lam, 0 <= beta < 1 ->
  ((forall x m, ema_run x m eta beta lam -> is_lim_seq x 0) <-> 0 < eta * lam < momentum_edge beta).
Proof. exact ema_limit. Qed.

(* [T5] An uncoupled block under idle momentum goes to 0 whenever 0 < eta lam < 2 (1 + beta^p)/(1 - beta^p).
   Met: uncoupled quadratics. *)
Theorem claim_uncoupled_decays : forall x m eta beta lam p, (0 < p)%nat -> 0 <= beta < 1 ->
  0 < eta * lam < uncoupled_edge beta p -> visited_block x m eta beta lam p ->
  is_lim_seq (fun k => x (k * p)%nat) 0.
Proof. exact uncoupled_decays. Qed.
